"""Sends an e-mail for every message of a topic, tries again what fails, and sets aside what cannot be sent.

What it shows: `Consumer` with workers, retries and dead letters. A mail server that is away or busy is asked again; an
address it refuses for good is not, and the message goes to `emails-dlt`. Nothing else moves the group's position: kill
this program at any moment and no mail is forgotten. One that was just being sent is sent twice.

    holdfast serve --data-dir ./data                                    # in one terminal
    holdfast topics create --topic emails --partitions 3                # in another
    echo '{"to": "ann@example.org", "subject": "Hello"}' | holdfast produce --topic emails
    python examples/email_sender.py --smtp localhost:25

Without `--smtp` mails are printed. `holdfast dlq list --topic emails-dlt` shows what was set aside, and
`holdfast dlq redrive` sends it back once the cause is gone. Ctrl-C ends it: what is under way is finished first.
"""

from __future__ import annotations

import argparse
import json
import smtplib
from collections.abc import Callable
from email.message import EmailMessage

from holdfast.client import Consumer, DeadLetter, Message, RetryPolicy

Send = Callable[[EmailMessage], None]


def by_smtp(address: str) -> Send:
    """Through a mail server, one connection for each mail."""
    host, _, port = address.rpartition(":")

    def send(mail: EmailMessage) -> None:
        with smtplib.SMTP(host, int(port), timeout=30) as server:
            try:
                server.send_message(mail)
            except smtplib.SMTPRecipientsRefused as refused:
                ((code, reason),) = refused.recipients.values()
                # 4xx is "not now", 5xx is "never".
                if code >= 500:
                    raise DeadLetter(f"{mail['To']} was refused: {code} {reason.decode()}") from refused
                raise

    return send


def to_screen(mail: EmailMessage) -> None:
    print(f"to {mail['To']}: {mail['Subject']}", flush=True)


def mail_of(message: Message) -> EmailMessage:
    """The mail a message asks for; one that makes no sense will make none later."""
    try:
        asked = json.loads(message.value or b"")
        mail = EmailMessage()
        mail["From"] = "shop@example.org"
        mail["To"] = asked["to"]
        mail["Subject"] = asked["subject"]
        # Mail servers and people recognise what they got twice by it.
        mail["Message-ID"] = (
            f"<{message.origin.topic}-{message.origin.partition}-{message.origin.offset}@example.org>"
        )
        mail.set_content(asked.get("text", ""))
    except (ValueError, KeyError, TypeError) as error:
        raise DeadLetter(f"not a mail: {error!r}") from error
    return mail


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bootstrap-server", default="localhost:9092")
    parser.add_argument("--topic", default="emails")
    parser.add_argument("--smtp", metavar="HOST:PORT", help="a mail server (mails are printed)")
    parser.add_argument("--attempts", type=int, default=8)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of Kafka's consumer"
    )
    options = parser.parse_args()

    send = to_screen if options.smtp is None else by_smtp(options.smtp)
    consumer = Consumer(
        options.bootstrap_server,
        group="email-sender",
        topics=[options.topic],
        workers=8,
        order="none",
        retry=RetryPolicy(attempts=options.attempts, first_seconds=0.2, longest_seconds=60),
        create_topics=True,
        config=dict(each.split("=", 1) for each in options.set),
    )
    consumer.run(lambda message: send(mail_of(message)))


if __name__ == "__main__":
    main()
