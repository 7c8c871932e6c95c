"""Text to typed values and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.catalog import BROKER, CLIENT_METRICS, GROUP, TOPIC
from holdfast.config.definitions import Setting, Type, Value, at_least
from holdfast.config.values import format_value, parse_value
from holdfast.errors import ConfigError

ALL_SETTINGS = [*BROKER.values(), *TOPIC.values(), *GROUP.values(), *CLIENT_METRICS.values()]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Type.BOOLEAN, " TRUE ", True),
        (Type.BOOLEAN, "false", False),
        (Type.INT, " +5 ", 5),
        (Type.INT, "-2147483648", -(2**31)),
        (Type.LONG, "9223372036854775807", 2**63 - 1),
        (Type.SHORT, "32767", 32767),
        (Type.DOUBLE, ".5d", 0.5),
        (Type.DOUBLE, "1e3", 1000.0),
        (Type.STRING, "  x y  ", "x y"),
        (Type.LIST, "", ()),
        (Type.LIST, " a , b,a ", ("a", "b")),
        (Type.PASSWORD, " secret ", "secret"),
    ],
)
def test_text_is_read_as_kafka_reads_it(kind: Type, text: str, value: Value) -> None:
    assert parse_value(Setting("some.name", kind, None), text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Type.BOOLEAN, "yes"),
        (Type.BOOLEAN, ""),
        (Type.INT, ""),
        (Type.INT, "1_000"),
        (Type.INT, "1.0"),
        (Type.INT, "2147483648"),
        (Type.INT, "--1"),
        (Type.INT, "9" * 5000),
        (Type.SHORT, "32768"),
        (Type.LONG, "9223372036854775808"),
        (Type.DOUBLE, "abc"),
        (Type.DOUBLE, "nan"),
        (Type.DOUBLE, "inf"),
        (Type.DOUBLE, "1e999"),
        (Type.DOUBLE, "1.2.3"),
        (Type.DOUBLE, "d"),
        (Type.LIST, "a,,b"),
        (Type.LIST, "a,"),
    ],
)
def test_text_of_the_wrong_type_is_refused(kind: Type, text: str) -> None:
    with pytest.raises(ConfigError, match=r"^some\.name=.* \(file:7\): allowed is "):
        parse_value(Setting("some.name", kind, None), text, "file:7")


def test_error_says_name_value_place_and_what_is_allowed() -> None:
    setting = Setting("num.partitions", Type.INT, 1, at_least(1))
    with pytest.raises(ConfigError) as caught:
        parse_value(setting, "0", "server.properties:12")
    assert str(caught.value) == "num.partitions='0' (server.properties:12): allowed is 1 or more"


def test_passwords_are_not_shown_in_errors() -> None:
    setting = Setting(
        "ssl.key.password", Type.PASSWORD, None, at_least(1)._replace(accepts=lambda value: False)
    )
    with pytest.raises(ConfigError) as caught:
        parse_value(setting, "hunter2")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (False, "false"),
        (None, None),
        (12, "12"),
        (("a", "b"), "a,b"),
        ((), ""),
        (0.5, "0.5"),
        (1.0, "1.0"),
        (0.0, "0.0"),
        (0.001, "0.001"),
        (0.0005, "5.0E-4"),
        (0.00012, "1.2E-4"),
        (1e-9, "1.0E-9"),
        (9999999.0, "9999999.0"),
        (10000000.0, "1.0E7"),
        (12345678.5, "1.23456785E7"),
        (-10000000.0, "-1.0E7"),
        (2147483647.0, "2.147483647E9"),
        (1.7976931348623157e308, "1.7976931348623157E308"),
    ],
)
def test_values_are_written_as_java_writes_them(value: Value, text: str | None) -> None:
    assert format_value(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_written_number_is_read_back_the_same(number: float) -> None:
    text = format_value(number)
    assert text is not None
    assert parse_value(Setting("some.ratio", Type.DOUBLE, None), text) == number


@pytest.mark.parametrize("setting", ALL_SETTINGS, ids=lambda setting: setting.name)
def test_every_default_satisfies_its_own_type_and_rule(setting: Setting) -> None:
    text = format_value(setting.default)
    if text is None or (setting.name == "controller.listener.names" and text == ""):
        return  # not set: no rule applies
    assert parse_value(setting, text) == setting.default
