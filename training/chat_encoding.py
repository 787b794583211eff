"""A conversation as token ids, and which of them the assistant said."""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from ..conversation import breaker, cut, unused_character, without_media


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
OF_A_ROW = ("tools", "thinking")  # what a row says beside `messages`

Spans = list[tuple[int, int]]


class ChatEncoder:
    """Conversations as the chat template of a tokenizer writes them.

    What the assistant said is what the template marks with `{% generation %}`; without such marks, what a message of the
    assistant adds to the prompt that asks for it. A prompt and its answer are encoded each on its own, as they are when the
    answer is generated, and nothing that stands in a conversation becomes a control token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", variables: Mapping[str, Any]):
        """
        Args:
            variables: of the template.

        Raises:
            ValueError: the tokenizer has no chat template, or several.
        """
        template = tokenizer.chat_template
        if template is None or isinstance(template, dict):
            got = "none" if template is None else f"several: {', '.join(template)}"
            raise ValueError(
                f"chat.template: expected a tokenizer with a chat template, or a file with one, got {got}"
            )
        self.tokenizer, self.template, self.variables = tokenizer, template, dict(variables)
        tokens = tuple(str(token) for token in tokenizer.added_tokens_decoder.values())
        self._breaker = functools.lru_cache(4)(functools.partial(breaker, tokens))

    def __call__(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        """Token ids, and for each whether it is learned, of a row with `messages` and, if need be, `tools` and `thinking`.

        Raises:
            ValueError: there are no messages; one is not text; the assistant says nothing; the template refuses.
        """
        messages = _checked(row)
        variables = {**self.variables, **{name: row[name] for name in OF_A_ROW if row.get(name) is not None}}
        tools = variables.pop("tools", None)
        border = unused_character([messages, tools, variables, self.template])
        broken = self._breaker(border)
        [messages] = broken(without_media([messages]))
        options = {"tools": broken(tools), "chat_template": self.template}
        options |= {**self.tokenizer.special_tokens_map, **broken(variables)}
        text, spans = self._rendered(messages, options)
        pieces = [(piece, mine) for part, mine in cut(text, sorted(spans)) for piece in part.split(border) if piece]
        encoded = self.tokenizer([piece for piece, _ in pieces], add_special_tokens=False)["input_ids"]
        learned = [mine for ids, (_, mine) in zip(encoded, pieces, strict=True) for _ in ids]
        if not any(learned[1:]):
            raise ValueError("messages: expected something that the assistant said, got nothing to learn")
        return [token for ids in encoded for token in ids], learned

    def _rendered(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> tuple[str, Spans]:
        if MARKS.search(self.template):
            [text], [spans] = _by_template(messages, return_assistant_tokens_mask=True, **options)
            return text, [tuple(span) for span in spans]
        text = _render(messages, options)
        return text, list(_added(messages, text, options))


def _render(messages: list[dict[str, Any]], options: dict[str, Any], *, prompt: bool = False) -> str:
    return _by_template(messages, add_generation_prompt=prompt, **options)[0][0]


def _by_template(messages: list[dict[str, Any]], **options: Any):
    try:
        return render_jinja_template([messages], **options)
    except TemplateSyntaxError as error:
        raise ValueError(f"chat.template: expected a Jinja template, got in line {error.lineno}: {error}") from error
    except (TemplateError, TypeError) as error:
        raise ValueError(f"messages: expected what the chat template takes, got: {error}") from error


def _added(messages: list[dict[str, Any]], text: str, options: dict[str, Any]) -> Iterator[tuple[int, int]]:
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(messages[:number], options, prompt=True)
        after = _render(messages[: number + 1], options)
        if not (after.startswith(before) and text.startswith(after)):
            raise ValueError(
                "chat.template: expected one that marks with {% generation %} what the assistant says, or to whose text each "
                f"message only adds, got one that changes it at message {number}"
            )
        yield len(before), len(after)


def _is_call(call: object) -> bool:
    """One of a tool: `{"name": ...}`, or within `function`."""
    function = (call.get("function") or call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _checked(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = row.get("messages") if isinstance(row, Mapping) else None
    if not isinstance(messages, list) or not messages:
        fields = messages is None and isinstance(row, Mapping)
        got = f"the fields {sorted(row)}" if fields else repr(messages if isinstance(row, Mapping) else row)[:60]
        raise ValueError(f"expected an object with a list of messages, got {got}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message:
            raise ValueError(f"messages.{number}: expected an object with a role, got {repr(message)[:60]}")
        content, calls = message.get("content"), message.get("tool_calls")
        known = message["role"] in ("user", "assistant", "system")  # of others, templates may take objects
        if known and not (content is None or isinstance(content, (str, list))):
            raise ValueError(f"messages.{number}.content: expected text, or a list of parts, got {repr(content)[:60]}")
        if not (calls is None or isinstance(calls, list) and all(map(_is_call, calls))):
            raise ValueError(
                f"messages.{number}.tool_calls: expected objects with a name each, got {repr(calls)[:60]}"
            )
        kinds = (
            {item.get("type") if isinstance(item, dict) else "text" for item in content}
            if isinstance(content, list)
            else set()
        )
        if kinds - {"text"}:
            raise ValueError(
                f"messages.{number}.content: expected text (`moe-lc prepare-images` reads pictures), got {sorted(map(str, kinds))}"
            )
    return messages
