"""The parts of the demo that need no Spark: its sender, what is read from a job's files, its screen, its directory."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from confluent_kafka import Producer
from rich.console import Console

from holdfast.cli.demo import workplace
from holdfast.demo.count import ids_in_parquet, numbers_in_topic
from holdfast.demo.orders import NUMBER_HEADER, PARTITIONS, SOURCE, Kind, OrderMessage, Orders
from holdfast.demo.processes import Child, DemoFailed, PipelineJob, PlainJob, Sender
from holdfast.demo.screen import Screen
from holdfast.demo.sender import Allowance, Errand, run
from holdfast.errors import UsageError
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import wait_until

FAST = 1e9


class Notes:
    """A way of sending that writes down what it is given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sent: list[OrderMessage] = []

    def send(self, messages: Sequence[OrderMessage]) -> None:
        self.sent += messages
        self.calls.append(f"send {messages[0].number}-{messages[-1].number}")

    def settle(self) -> None:
        self.calls.append("settle")

    def close(self) -> None:
        self.calls.append("close")


def errand(first: int = 0, count: int = 50, spool: str | None = None, bootstrap: str = "") -> Errand:
    return Errand(bootstrap, count, 1_700_000_000_000, 0, first, FAST, spool)


def test_the_sender_goes_as_far_as_it_may_and_answers_what_it_took() -> None:
    way = Notes()
    answers: list[str] = []
    run(errand(first=15), way, Allowance(io.StringIO("30\n50\n")), answers.append)
    assert way.sent == [*map(Orders(50, 1_700_000_000_000).message, range(15, 50)), *way.sent[35:]]
    assert [message.kind for message in way.sent[35:]] == [Kind.CLOSING] * PARTITIONS
    assert answers[-2:] == ["taken 50", "done"]


def test_the_closing_messages_wait_until_everything_else_has_arrived() -> None:
    way = Notes()
    run(errand(count=20), way, Allowance(io.StringIO("20\n")), lambda line: None)
    assert way.calls == ["send 0-19", "settle", "send 20-23", "settle", "close"]


def test_the_sender_ends_when_nobody_tells_it_to_go_on() -> None:
    way = Notes()
    with pytest.raises(SystemExit):
        run(errand(), way, Allowance(io.StringIO("10\n")), lambda line: None)
    assert [message.number for message in way.sent] in ([], list(range(10)))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(str(tmp_path / "data")) as process:
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": process.bootstrap_servers})
        admin.create_topics([NewTopic(SOURCE, PARTITIONS, 1)])[SOURCE].result(30)
        yield process


@pytest.mark.check
def test_a_sender_that_is_killed_goes_on_behind_its_last_answer(
    tmp_path: Path, broker: BrokerProcess
) -> None:
    sender = Sender(tmp_path / "log", errand(count=400, spool=str(tmp_path / "spool")))
    try:
        sender.start(broker.bootstrap_servers)
        sender.allow(200)
        wait_until(lambda: sender.taken > 0, "an answer")
        broker.crash()
        wait_until(lambda: sender.taken == 200, "answers without a broker")
        sender.kill()
        assert not sender.is_alive
        sender.start(broker.bootstrap_servers)
        broker.restart()
        sender.allow(400)
        wait_until(lambda: sender.is_done, "the end")
    finally:
        sender.kill()
    numbers = list(numbers_in_topic(broker.bootstrap_servers, SOURCE))
    assert set(numbers) == set(range(400 + PARTITIONS))


def test_messages_whose_markers_are_on_their_way_are_counted(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "transactional.id": "late"})
    producer.init_transactions(60)
    producer.begin_transaction()
    for number in range(3):
        producer.produce(SOURCE, b"{}", headers=[(NUMBER_HEADER, b"%d" % number)], partition=0)
    assert producer.flush(60) == 0
    waits: list[float] = []

    def commit_meanwhile(seconds: float) -> None:
        if not waits:
            producer.commit_transaction(60)
        waits.append(seconds)

    monkeypatch.setattr(time, "sleep", commit_meanwhile)
    assert list(numbers_in_topic(broker.bootstrap_servers, SOURCE)) == [0, 1, 2]
    assert waits


def test_a_process_that_ends_by_itself_is_told_of_with_its_last_words(tmp_path: Path) -> None:
    child = Child("job", tmp_path / "log")
    process = child.spawn([sys.executable, "-c", "import sys; sys.exit('out of luck')"])
    process.wait()
    with pytest.raises(DemoFailed, match="out of luck"):
        child.require_alive()


def test_a_child_is_killed_with_its_children(tmp_path: Path) -> None:
    child = Child("job", tmp_path / "log")
    program = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True).wait()"
    )
    child.spawn([sys.executable, "-c", program])
    from holdfast.testing.processes import marked

    wait_until(lambda: len(marked(child._mark)) == 2, "the grandchild")
    assert child.kill() == 2
    assert not marked(child._mark)


def test_a_child_that_ends_well_leaves_no_process_behind(tmp_path: Path) -> None:
    """As a run of a pipeline would, that has an archive of Spark's classes made."""
    from holdfast.testing.processes import marked

    child = Child("job", tmp_path / "log")
    beside = "[sys.executable, '-c', 'import time; time.sleep(600)']"
    program = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0));"
        f"subprocess.Popen({beside}, start_new_session=True); signal.pause()"
    )
    child.spawn([sys.executable, "-c", program])
    wait_until(lambda: len(marked(child._mark)) == 2, "what is beside it")
    child.stop()
    assert not marked(child._mark)


# ------------------------------------------------------------------------------- jobs


def batch(start: int, end: int, main: int, windows: int) -> str:
    place = {"id": "00000000-0000-0000-0000-000000000001", "partitions": {"0": [start, end, 0]}}
    routes = {
        "main": main,
        "dead_letter": {"parse": 2, "positive-amount": 1},
        "filtered": {},
        "duplicate": 4,
        "late": 5,
    }
    document = {
        "event": "batch",
        "range": {SOURCE: place},
        "routes": routes,
        "sinks": {"orders": main, "totals": windows},
    }
    return json.dumps(document) + "\n"


def test_a_pipelines_log_is_added_up_and_a_batch_taken_again_counts_once(tmp_path: Path) -> None:
    job = PipelineJob(tmp_path, 100)
    assert (job.batches(), job.position(), job.counts().output) == (0, 0, 0)
    (tmp_path / "home").mkdir()
    log = tmp_path / "home" / "log.jsonl"
    log.write_text(batch(0, 100, 88, 0) + batch(100, 150, 38, 6) + '{"event": "ba')
    assert (job.batches(), job.position()) == (2, 150)
    with log.open("a") as file:
        file.write("\n" + batch(100, 150, 38, 6) + batch(150, 170, 8, 2))
    assert (job.batches(), job.position()) == (3, 170)
    counts = job.counts()
    assert (counts.dead_letter, counts.duplicate) == (9, 12)


def test_rows_are_counted_in_the_outputs_themselves(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    job = PipelineJob(tmp_path, 100)
    for output, rows in {"orders": 7, "late": 2, "totals": 3}.items():
        for each in range(2):
            directory = tmp_path / "out" / output / f"batch={each:020}"
            directory.mkdir(parents=True)
            pq.write_table(pa.table({"id": range(rows)}), directory / "part-0.parquet")
            counts = job.counts()
    assert (counts.output, counts.late, counts.windows) == (14, 4, 6)


def test_outputs_that_lack_the_newest_batch_are_counted(tmp_path: Path) -> None:
    job = PipelineJob(tmp_path, 100)
    for output, batches in {"orders": 3, "totals": 2, "late": 2}.items():
        for each in range(batches):
            (tmp_path / "out" / output / f"batch={each:020}").mkdir(parents=True)
    assert job.outputs() == 3
    assert job.unfinished() == "in mid-batch: 'orders' has it, 2 other outputs have not"
    (tmp_path / "out" / "totals" / f"batch={2:020}").mkdir()
    assert job.unfinished() == "in mid-batch: 'orders' has it, another output has not"
    (tmp_path / "out" / "late" / f"batch={2:020}").mkdir()
    assert job.unfinished() == "between two batches"


def test_a_plain_jobs_checkpoint_tells_how_far_it_is(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    job = PlainJob(tmp_path, 100)
    assert (job.batches(), job.outputs(), job.position()) == (0, 0, 0)
    for name in ("commits", "offsets"):
        (tmp_path / "checkpoint" / name).mkdir(parents=True)
    for number, ends in enumerate(({"0": 10, "1": 5}, {"0": 20, "1": 9}, {"0": 30, "1": 30})):
        text = "\n".join(["v1", "{}", json.dumps({SOURCE: ends})])
        (tmp_path / "checkpoint" / "offsets" / str(number)).write_text(text)
    for number in range(2):
        (tmp_path / "checkpoint" / "commits" / str(number)).write_text("v1\n{}")
    (tmp_path / "out" / "orders" / "_temporary").mkdir(parents=True)
    rows = pa.table({"id": [1, 2, 3]})
    pq.write_table(rows, tmp_path / "out" / "orders" / "part-0.parquet")
    pq.write_table(rows, tmp_path / "out" / "orders" / "_temporary" / "part-1.parquet")
    assert (job.batches(), job.outputs(), job.position(), job.counts().output) == (2, 1, 29, 3)
    assert job.unfinished() == "in mid-batch: 'orders' has it, the checkpoint has not"
    assert list(ids_in_parquet(tmp_path / "out" / "orders")) == [1, 2, 3]


# ------------------------------------------------------------------------------- screen and directory


def test_without_a_terminal_events_and_counters_are_lines() -> None:
    text = io.StringIO()
    with Screen(Console(file=text, width=200), "a demo") as screen:
        screen.say("the broker is back")
        screen.set("sent", 12_345)
    lines = text.getvalue().splitlines()
    assert lines[0] == "a demo"
    assert lines[1].endswith("the broker is back")
    assert "sent 12,345, stored –" in lines[2]


def test_a_terminal_shows_counters_processes_and_events_in_one_picture() -> None:
    from holdfast.demo.screen import Process

    screen = Screen(Console(), "a demo")
    screen.processes["broker"] = Process("broker", "killed", 4711, 1)
    screen.set("late", 7)
    screen.say("SIGKILL to the broker")
    out = Console(file=io.StringIO(), width=120)
    out.print(screen.picture())
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert "a demo" in shown
    assert "pid 4711" in shown
    assert "killed once" in shown
    assert "SIGKILL to the broker" in shown
    assert " 7 " in shown


def test_a_directory_with_something_in_it_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UsageError, match="has something in it"), workplace(str(tmp_path)):
        pass
    with workplace(str(tmp_path / "new")) as directory:
        assert directory == tmp_path / "new"
    assert directory.is_dir()


def test_a_temporary_directory_is_gone_afterwards() -> None:
    with workplace(None) as directory:
        assert directory.is_dir()
    assert not directory.exists()


@pytest.mark.check
def test_the_broker_alone_needs_no_java(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast.cli", "demo", "--no-pipeline", "--messages", "2000"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PATH": "", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing was lost" in done.stdout
