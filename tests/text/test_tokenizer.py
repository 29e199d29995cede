# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from cedar.errors import CedarError
from cedar.text.tokenizer import STRUCTURE_TOKENS, Piece, Tokenizer, load_tokenizer

CHECKPOINTS = ("tiny-a", "tiny-b")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_id_decodes_as_the_tokenizers_library_decodes_it(golden: Path, name: str) -> None:
    directory = golden / name / "checkpoint"
    ours, reference = load_tokenizer(directory), tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    for token_id in range(len(ours) + 50):
        assert ours.decode([token_id]) == reference.decode([token_id], skip_special_tokens=True)


@given(ids=st.lists(st.integers(0, 700), max_size=30))
def test_any_ids_decode_as_the_tokenizers_library_decodes_them(tokenizer: Tokenizer, chat_json: str, ids: list[int]) -> None:
    reference = tokenizers.Tokenizer.from_str(chat_json)
    ids = [i for i in ids if reference.id_to_token(i) not in STRUCTURE_TOKENS]
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@given(text=TEXTS)
def test_text_survives_encoding_and_decoding(base_tokenizer: Tokenizer, text: str) -> None:
    assert base_tokenizer.decode(base_tokenizer.encode(text)) == text


def test_raw_prompt_gets_one_bos_and_never_two(base_tokenizer: Tokenizer) -> None:
    bos = base_tokenizer.bos_id
    assert base_tokenizer.encode_prompt("hello")[0] == bos
    assert base_tokenizer.encode_prompt("<bos>hello") == base_tokenizer.encode_prompt("hello")
    assert base_tokenizer.encode_prompt("") == [bos]


def test_raw_prompt_keeps_its_control_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_prompt("a<｜User｜>b")
    assert tokenizer.token_id("<｜User｜>") in ids


def test_raw_prompt_with_an_image_token_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(CedarError, match=r"^INVALID_ARGUMENT: text_input: contains <｜deepseek_image｜>; allowed: text"):
        tokenizer.encode_prompt("see <｜deepseek_image｜>")


def test_control_spelling_inside_a_text_piece_stays_text(tokenizer: Tokenizer) -> None:
    spellings = "".join(token.content for token in tokenizer._backend.get_added_tokens_decoder().values())
    added = set(tokenizer._backend.get_added_tokens_decoder())
    ids = tokenizer.encode_pieces([Piece(spellings)])
    assert not added & set(ids)
    assert tokenizer.decode(ids) == spellings


@given(parts=st.lists(TEXTS.filter(lambda text: not set("<｜") & set(text)), min_size=1, max_size=4))
def test_pieces_without_control_spellings_encode_as_one_string(tokenizer: Tokenizer, parts: list[str]) -> None:
    pieces, whole = [], ""
    for number, part in enumerate(parts):
        half = len(part) // 2
        control = "<｜User｜>" if number % 2 else "</think>"
        pieces += [Piece(part[:half]), Piece(part[half:]), Piece(control, control=True)]
        whole += part + control
    assert tokenizer.encode_pieces(pieces) == tokenizer.encode(whole)


def test_structure_tokens_stay_in_decoded_text_though_flagged_special(tokenizer: Tokenizer) -> None:
    for token in STRUCTURE_TOKENS:
        assert tokenizer.decode([tokenizer.token_id(token)]) == token
    assert tokenizer.decode([tokenizer.eos_id, tokenizer.token_id("<｜latest_reminder｜>")]) == ""


def test_token_text_shows_special_tokens(base_tokenizer: Tokenizer) -> None:
    assert base_tokenizer.token_text(base_tokenizer.eos_id) == "<eos>"


def test_lone_surrogate_is_an_error_that_names_the_field(base_tokenizer: Tokenizer) -> None:
    with pytest.raises(CedarError, match=r"text_input: holds half of a surrogate pair"):
        base_tokenizer.encode_prompt("ab\ud800")


def test_missing_control_token_is_named(base_tokenizer: Tokenizer) -> None:
    with pytest.raises(CedarError, match="this checkpoint's tokenizer has no '<｜User｜>'"):
        base_tokenizer.encode_pieces([Piece("<｜User｜>", control=True)])


def test_length_limits_in_the_file_do_not_cut_prompts(chat_json: str) -> None:
    spec = json.loads(chat_json)
    spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    limited = Tokenizer(json.dumps(spec), "<bos>", "<eos>")
    assert len(limited.encode("one two three four five")) > 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.json": None}, "model: cannot read tokenizer.json"),
        ({"tokenizer_config.json": None}, "model: cannot read tokenizer_config.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json: cannot be read"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json: not valid JSON"),
        ({"tokenizer_config.json": '{"bos_token": "<bos>"}'}, "tokenizer_config.json: eos_token: is None"),
        (
            {"tokenizer_config.json": '{"bos_token": "<b>", "eos_token": "<eos>"}'},
            "bos_token: this checkpoint's tokenizer has no",
        ),
    ],
)
def test_broken_tokenizer_directory_names_the_file(
    golden: Path, tmp_path: Path, change: dict[str, str | None], message: str
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = change.get(name, (golden / "tiny-a" / "checkpoint" / name).read_text())
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(CedarError, match=message):
        load_tokenizer(tmp_path)


def test_decoder_that_is_not_byte_level_is_refused(chat_json: str) -> None:
    spec = json.loads(chat_json) | {"decoder": {"type": "Fuse"}}
    with pytest.raises(CedarError, match=r"tokenizer.json: its decoder is Fuse; allowed: ByteLevel"):
        Tokenizer(json.dumps(spec), "<bos>", "<eos>")


def test_token_given_as_object_is_accepted(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((golden / "tiny-a" / "checkpoint" / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<bos>"}, "eos_token": "<eos>"}')
    assert load_tokenizer(tmp_path).bos_id == 0
