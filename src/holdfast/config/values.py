"""Text to typed values and back, as Kafka reads and writes them.

Kafka trims what it reads, takes `TRUE` for true, splits lists at commas and drops repeated items. The one
difference: NaN and infinities are refused, since no setting means anything by them.
"""

from __future__ import annotations

from decimal import Decimal

from holdfast.config.definitions import Setting, Type, Value
from holdfast.errors import ConfigError

_JAVA_WHITESPACE = "".join(map(chr, range(33)))
_BITS = {Type.SHORT: 16, Type.INT: 32, Type.LONG: 64}


def bad_value(setting: Setting, text: str, allowed: str, where: str = "") -> ConfigError:
    shown = "<hidden>" if setting.is_sensitive else repr(text)
    place = f" ({where})" if where else ""
    return ConfigError(f"{setting.name}={shown}{place}: allowed is {allowed}")


def parse_value(setting: Setting, text: str, where: str = "") -> Value:
    """The typed value of a setting, or ConfigError with the name, the text, the place and what is allowed."""
    trimmed = text.strip(_JAVA_WHITESPACE)
    value: Value
    if setting.type is Type.BOOLEAN:
        value = _boolean(setting, trimmed, where)
    elif setting.type in _BITS:
        value = _integer(setting, trimmed, where)
    elif setting.type is Type.DOUBLE:
        value = _double(setting, trimmed, where)
    elif setting.type is Type.LIST:
        value = _list(setting, trimmed, where)
    else:
        value = trimmed
    if setting.rule is not None and not setting.rule.accepts(value):
        raise bad_value(setting, text, setting.rule.allowed, where)
    return value


def _boolean(setting: Setting, text: str, where: str) -> bool:
    folded = text.lower()
    if folded not in ("true", "false"):
        raise bad_value(setting, text, "true or false", where)
    return folded == "true"


def _integer(setting: Setting, text: str, where: str) -> int:
    bits = _BITS[setting.type]
    digits = text[1:] if text[:1] in ("+", "-") else text
    if digits.isascii() and digits.isdigit() and len(digits) <= 40:
        number = int(text)
        if -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
            return number
    allowed = f"a whole number of {bits} bits"
    if setting.rule is not None:
        allowed += f", {setting.rule.allowed}"
    raise bad_value(setting, text, allowed, where)


def _double(setting: Setting, text: str, where: str) -> float:
    allowed = "a number" if setting.rule is None else f"a number, {setting.rule.allowed}"
    body = text[:-1] if text[-1:] in ("d", "D", "f", "F") else text
    if not body or not set(body) <= set("0123456789+-.eE"):
        raise bad_value(setting, text, allowed, where)
    try:
        number = float(body)
    except ValueError:
        raise bad_value(setting, text, allowed, where) from None
    if number in (float("inf"), float("-inf")):
        raise bad_value(setting, text, allowed, where)
    return number


def _list(setting: Setting, text: str, where: str) -> tuple[str, ...]:
    items = split_list(text)
    if "" in items:
        raise bad_value(setting, text, "a list with commas between items, none of them empty", where)
    return items


def split_list(text: str) -> tuple[str, ...]:
    """The items of a comma-separated list, repeated ones once, in the order of their first appearance."""
    trimmed = text.strip(_JAVA_WHITESPACE)
    if not trimmed:
        return ()
    return tuple(dict.fromkeys(item.strip(_JAVA_WHITESPACE) for item in trimmed.split(",")))


def format_value(value: Value) -> str | None:
    """A value as Kafka writes it in DescribeConfigs."""
    if value is None:
        return None
    if value is True:
        return "true"
    if value is False:
        return "false"
    if isinstance(value, float):
        return _java_double(value)
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)


def _java_double(value: float) -> str:
    """Java writes plain decimals from 1e-3 up to 1e7 and d.dddE±n outside."""
    magnitude = abs(value)
    if magnitude == 0 or 1e-3 <= magnitude < 1e7:
        return repr(value)
    digits, _, exponent = f"{Decimal(repr(value)).normalize():E}".partition("E")
    if "." not in digits:
        digits += ".0"
    return f"{digits}E{int(exponent)}"
