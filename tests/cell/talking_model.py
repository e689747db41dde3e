"""The tiny model with the ways of a larger one: merged tokens, tools, reasoning that its template forgets."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

MERGES = [("l", "s"), ("{", '"'), ('"', ":"), ("o", "k"), ("a", "a"), ("Ċ", "Ċ")]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool.function.name + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(asked=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and m.reasoning and loop.index0 > ns.asked %}
{{- '<think>\\n' + m.reasoning | trim + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content | trim if m.content else '' }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def make(tiny, directory):
    """Write the model; `tiny` is gyre:tiny's directory, whose weights it has."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    for one, other in MERGES:
        vocabulary[one + other] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=8192
    )
    fast.chat_template = TEMPLATE.replace("\n{%- ", "{%- ").replace("\n{{- ", "{{- ").strip()
    fast.save_pretrained(directory)
    (directory / "model.safetensors").symlink_to(tiny / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        config = json.loads((tiny / name).read_text())
        config |= {"eos_token_id": fast.eos_token_id, "pad_token_id": fast.pad_token_id}
        (directory / name).write_text(json.dumps(config))
    return fast
