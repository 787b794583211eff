"""The chat format: its control tokens and the template that writes them. `moe-lc prepare` gives both to the tokenizers it
trains; a processor takes the template of its tokenizer, or another one."""

from importlib import resources

from .processing_moe_lc import MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD


# In the order of their ids in a trained tokenizer; the first is `media_placeholder_token_id` of the preset "nano".
CHAT_TOKENS = (MEDIA_PAD, MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")


def load_chat_template() -> str:
    """The Jinja template of the format (`chat_template.jinja`), for tokenizers that have `CHAT_TOKENS`."""
    return resources.files(__package__).joinpath("chat_template.jinja").read_text(encoding="utf-8")
