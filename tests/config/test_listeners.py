"""What to bind, what to advertise, and the mistakes that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import BrokerConfig, Listener, listeners_for
from holdfast.config.listeners import Endpoint, address_text, endpoint_text, is_every_address, parse_endpoint
from holdfast.errors import ConfigError


def listeners(**settings: str) -> tuple[Listener, ...]:
    return BrokerConfig.load({name.replace("_", "."): value for name, value in settings.items()})[0].listeners


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("PLAINTEXT://localhost:9092", Endpoint("PLAINTEXT", "localhost", 9092)),
        ("plaintext://localhost:9092", Endpoint("PLAINTEXT", "localhost", 9092)),
        ("PLAINTEXT://:9092", Endpoint("PLAINTEXT", "", 9092)),
        ("PLAINTEXT://[::1]:9092", Endpoint("PLAINTEXT", "::1", 9092)),
        ("PLAINTEXT://::1:9092", Endpoint("PLAINTEXT", "::1", 9092)),
        ("INSIDE://my_host-1.example:0", Endpoint("INSIDE", "my_host-1.example", 0)),
        ("PLAINTEXT://[fe80::1%eth0]:1", Endpoint("PLAINTEXT", "fe80::1%eth0", 1)),
    ],
)
def test_endpoints_are_read(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text, "listeners") == endpoint


@pytest.mark.parametrize(
    "text",
    [
        "localhost:9092",
        "PLAINTEXT://localhost",
        "PLAINTEXT://localhost:",
        "PLAINTEXT://9092",
        "PLAINTEXT://localhost:70000",
        "PLAINTEXT://localhost:-1",
        "PLAINTEXT://localhost:x",
        "PLAINTEXT://local host:9092",
        "PLAINTEXT://[::1]",
        "://localhost:9092",
        "PLAINTEXT://localhost:९",
        "",
    ],
)
def test_what_is_no_endpoint_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^listeners: .*such as PLAINTEXT://127\.0\.0\.1:9092"):
        parse_endpoint(text, "listeners")


@given(
    st.sampled_from(["PLAINTEXT", "INSIDE"]),
    st.sampled_from(["", "localhost", "10.0.0.1", "::1", "2001:db8::5"]),
    st.integers(0, 65535),
)
def test_written_endpoint_is_read_back(name: str, host: str, port: int) -> None:
    assert parse_endpoint(endpoint_text(name, host, port), "x") == Endpoint(name, host, port)


@pytest.mark.parametrize("host", ["0.0.0.0", "", "[::]", "[0:0:0:0:0:0:0:0]"])
def test_every_address_without_an_advertised_one_is_refused_with_the_remedy(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        listeners(listeners=f"PLAINTEXT://{host}:9092")
    message = str(caught.value)
    assert message.startswith("listeners (properties): ")
    assert "every address" in message
    assert "advertised.listeners=PLAINTEXT://<host name>:9092" in message
    assert "PLAINTEXT://127.0.0.1:9092" in message


@pytest.mark.parametrize("host", ["0.0.0.0", "", "[::]"])
def test_every_address_with_an_advertised_one_is_fine(host: str) -> None:
    (listener,) = listeners(
        listeners=f"PLAINTEXT://{host}:9092", advertised_listeners="PLAINTEXT://broker.example:9192"
    )
    assert is_every_address(listener.host)
    assert (listener.advertised_host, listener.advertised_port) == ("broker.example", 9192)


@pytest.mark.parametrize("advertised", ["PLAINTEXT://broker.example:0", "PLAINTEXT://broker.example"])
def test_advertised_port_that_is_zero_or_missing_means_the_bound_one(advertised: str) -> None:
    (listener,) = listeners(listeners="PLAINTEXT://:0", advertised_listeners=advertised)
    assert (listener.port, listener.advertised_host, listener.advertised_port) == (0, "broker.example", 0)


def test_bound_host_and_port_are_advertised_when_nothing_is_told() -> None:
    (listener,) = listeners(listeners="PLAINTEXT://10.1.2.3:0")
    assert (listener.advertised_host, listener.advertised_port) == ("10.1.2.3", 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "", "[::]"])
def test_nowhere_cannot_be_advertised(host: str) -> None:
    with pytest.raises(ConfigError, match="no address at all"):
        listeners(listeners="PLAINTEXT://:9092", advertised_listeners=f"PLAINTEXT://{host}:9092")


def test_advertised_name_must_be_a_listener() -> None:
    with pytest.raises(ConfigError, match="advertises INSIDE, which is not in listeners"):
        listeners(listeners="PLAINTEXT://localhost:1", advertised_listeners="INSIDE://localhost:1")


def test_listeners_without_an_advertised_entry_advertise_themselves() -> None:
    two = listeners(
        listeners="PLAINTEXT://:9092,INSIDE://10.0.0.1:9094",
        advertised_listeners="PLAINTEXT://broker.example:9092",
        listener_security_protocol_map="PLAINTEXT:PLAINTEXT,INSIDE:PLAINTEXT",
    )
    assert [(one.name, one.advertised_host) for one in two] == [
        ("PLAINTEXT", "broker.example"),
        ("INSIDE", "10.0.0.1"),
    ]


@pytest.mark.parametrize("protocol", ["SSL", "SASL_PLAINTEXT", "SASL_SSL"])
def test_protocols_we_do_not_serve_are_a_clear_error(protocol: str) -> None:
    with pytest.raises(ConfigError, match=f"{protocol}, which is not served yet"):
        listeners(listeners=f"{protocol}://localhost:9093")


def test_controller_listener_is_noticed_and_not_opened_whatever_its_protocol() -> None:
    config, notices = BrokerConfig.load(
        {
            "listeners": "PLAINTEXT://localhost:9092,CONTROLLER://:9093",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:SSL",
        }
    )
    assert [listener.name for listener in config.listeners] == ["PLAINTEXT"]
    assert notices == [
        "listener CONTROLLER://:9093 is a controller's and is not opened: holdfast is its own controller"
    ]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"listeners": "CONTROLLER://:1", "controller_listener_names": "controller"}, "give one for clients"),
        ({"listeners": "INSIDE://localhost:1"}, "add INSIDE:PLAINTEXT"),
        ({"listeners": "PLAINTEXT://a:1,PLAINTEXT://b:2"}, "given twice"),
        (
            {
                "listeners": "PLAINTEXT://a:1,B://a:1",
                "listener_security_protocol_map": "PLAINTEXT:PLAINTEXT,B:PLAINTEXT",
            },
            "the same address and port",
        ),
        ({"listener_security_protocol_map": "PLAINTEXT:PLAIN"}, "not NAME:PROTOCOL"),
        ({"listener_security_protocol_map": "PLAINTEXT"}, "not NAME:PROTOCOL"),
        ({"listeners": ""}, "listeners=''"),
    ],
)
def test_listener_mistakes_are_refused(settings: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        listeners(**settings)


def test_one_name_may_stand_for_both_families_and_the_ipv6_half_is_optional() -> None:
    pair = listeners(listeners="PLAINTEXT://127.0.0.1:0,PLAINTEXT://[::1]:0")
    assert [(one.host, one.optional) for one in pair] == [("127.0.0.1", False), ("::1", True)]
    (alone,) = listeners(listeners="PLAINTEXT://[::1]:0")
    assert alone.optional is False


def test_described_default_can_be_given_back_as_a_setting() -> None:
    by_default = BrokerConfig.load({})[0]
    text = ",".join(by_default.values["listeners"])  # type: ignore[arg-type]
    assert listeners(listeners=text) == by_default.listeners


@pytest.mark.parametrize(
    ("listen", "value"),
    [
        ("127.0.0.1:9092", "PLAINTEXT://127.0.0.1:9092"),
        ("[::1]:0", "PLAINTEXT://[::1]:0"),
        (":9092", "PLAINTEXT://:9092"),
        ("INSIDE://h:1", "INSIDE://h:1"),
    ],
)
def test_listen_flag_becomes_a_listener(listen: str, value: str) -> None:
    assert listeners_for(listen) == value


def test_bad_listen_flag_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^--listen: "):
        listeners_for("9092")


def test_an_address_is_written_as_clients_read_it() -> None:
    assert address_text("::1", 9092) == "[::1]:9092"
    assert address_text("127.0.0.1", 9092) == "127.0.0.1:9092"
