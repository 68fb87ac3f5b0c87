"""Chat messages in OpenAI's format, reduced to what a text model's chat template accepts."""

from typing import Any

from pagedcli.errors import RequestError

Message = dict[str, Any]  # role, content (text), and what templates may use: name, tool_calls, tool_call_id
ROLES = ("system", "developer", "user", "assistant", "tool")
_OPTIONAL = ("name", "tool_calls", "tool_call_id", "reasoning_content")


def read_messages(messages: Any) -> list[Message]:
    """Validated messages, each with its content as one text. Raises: RequestError 'invalid_messages'."""
    if not isinstance(messages, list) or not messages:
        raise _invalid("'messages' must be a list with at least one message")
    return [_read_message(message, place) for place, message in enumerate(messages)]


def with_system_prompt(messages: list[Message], system_prompt: str | None) -> list[Message]:
    """The messages preceded by `system_prompt`, unless they have a system message."""
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def _read_message(message: Any, place: int) -> Message:
    where = f"messages[{place}]"
    if not isinstance(message, dict):
        raise _invalid(f"{where} must be an object with 'role' and 'content'")
    role = message.get("role")
    if role not in ROLES:
        raise _invalid(f"{where}.role is {str(role)[:40]!r}, known: {', '.join(ROLES)}")
    content = _read_content(message.get("content"), where, may_be_absent=bool(message.get("tool_calls")))
    extras = {name: message[name] for name in _OPTIONAL if message.get(name) is not None}
    # templates expect 'system'; 'developer' is OpenAI's newer name for it
    return {"role": "system" if role == "developer" else role, "content": content, **extras}


def _read_content(content: Any, where: str, *, may_be_absent: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_absent:
        return ""
    if not isinstance(content, list) or not content:
        raise _invalid(f"{where}.content must be a string or a list of text parts")
    texts = []
    for place, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else None
            raise _invalid(f"{where}.content[{place}] is {str(kind)[:40]!r}, only text parts are supported")
    return "\n".join(texts)  # as vLLM joins them


def _invalid(message: str) -> RequestError:
    return RequestError("invalid_messages", message)
