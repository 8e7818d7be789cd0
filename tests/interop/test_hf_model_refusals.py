"""What --hf-model refuses, each in one line that names the value and what to do."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from openlm_moe import UserError
from openlm_moe.hosts.builtin.architecture import HuggingFace
from openlm_moe.hosts.builtin.args import parse_args
from openlm_moe.interop import hf_model, hf_model_files

pytest.importorskip("transformers", minversion="5.0")


@pytest.fixture(scope="module")
def original(hf_folder):
    return hf_folder("mixtral")


@pytest.fixture
def folder(original, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(original, tmp_path / "model")


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def set_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--hf-model needs data of its own tokenizer: .* --tokenizer DIR/tokenizer.json"),
        ("--train-data x --model open_lm_41m", "--model open_lm_41m and --hf-model DIR both name a model"),
        ("--train-data x --experts 4", "--experts cannot be given with --hf-model"),
        ("--train-data x --moe-loss-weight 0.3", "--moe-loss-weight cannot be given with --hf-model"),
        ("--train-data x --expert-parallel 2", "--expert-parallel 2 does not work with --hf-model"),
        ("--train-data x --torchcompile", "--torchcompile does not work with --hf-model"),
        ("--train-data x --grad-checkpointing-scope experts", "--grad-checkpointing-scope experts does not work"),
        ("--train-data x --hf-seq-len 0", "--hf-seq-len is 0; it must be 1 or more"),
    ],
)
def test_flags_that_cannot_stand_beside_it(flags, message):
    with pytest.raises(UserError, match=message) as error:
        parse_args(["--hf-model", "DIR", *flags.split()])
    one_line(error)


def test_its_sequence_length_without_it():
    with pytest.raises(UserError, match="--hf-seq-len goes with --hf-model"):
        parse_args(["--train-data", "x", "--hf-seq-len", "8"])


def test_a_name_of_the_hub():
    with pytest.raises(UserError, match=r"mistralai/Mixtral-8x7B-v0\.1 is no folder with a config\.json; download"):
        hf_model.describe(hf_model_files.Path("mistralai/Mixtral-8x7B-v0.1"))


def test_more_tokens_than_positions(folder):
    with pytest.raises(UserError, match=r"--hf-seq-len is 129, but .* has positions for 128 tokens; lower it"):
        hf_model.describe(folder, 129)
    assert hf_model.describe(folder).seq_len == 128


def test_a_tokenizer_with_more_ids_than_the_model(hf_folder):
    small = hf_folder("mixtral")
    set_config(small, vocab_size=299)
    with pytest.raises(UserError, match=r"tokenizer\.json has 300 ids, but the model's vocabulary has 299"):
        HuggingFace.of(small, 8)


def test_data_of_another_vocabulary_and_of_shorter_samples(hf_case, tmp_path, capsys):
    case = hf_case("mixtral")
    small = shutil.copytree(case.model, tmp_path / "small")
    set_config(small, vocab_size=64)
    (small / "tokenizer.json").unlink()
    flags = case.flags(name="small")
    told = _refused([*flags, "--hf-model", small], capsys)
    assert "but the vocabulary has 64 entries" in told
    assert "has 25 tokens, but seq_len 128 needs 129" in _refused([*flags, "--hf-seq-len", 128], capsys)


def _refused(flags, capsys):
    from openlm_moe.main import main

    assert main(list(map(str, flags))) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "error:" in text]
    return line


def test_a_model_without_experts(tmp_path):
    from transformers import LlamaConfig

    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    LlamaConfig(vocab_size=32, **sizes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is a llama without experts in transformers' experts interface"):
        hf_model.describe(tmp_path, 8)


def test_quantized_weights(folder):
    set_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match="holds quantized weights, which cannot be trained"):
        hf_model.describe(folder, 8)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), r"lack model\.norm\.weight; they are not of this config\.json"),
        (lambda w: w.update({"model.norm.weight": torch.ones(3)}), r"have another shape for .*norm\.weight"),
    ],
)
def test_weights_of_another_model(folder, spoil, message):
    weights = load_file(folder / "model.safetensors")
    spoil(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=message) as error:
        hf_model_files.load(folder, hf_model.read_config(folder))
    one_line(error)


def test_no_weights_and_a_pickle(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=f"the weights of {re.escape(str(folder))} cannot be read: ") as error:
        hf_model_files.load(folder, hf_model.read_config(folder))
    one_line(error)


def test_an_unknown_family(folder):
    set_config(folder, model_type="nobody_knows")
    with pytest.raises(UserError, match=r"config\.json cannot be used: .*nobody_knows") as error:
        hf_model.describe(folder, 8)
    one_line(error)


def test_resuming_another_architecture(folder):
    described = hf_model.describe(folder, 8)
    from openlm_moe.hosts.builtin.saving import check_same_model

    state = {"model": described.to_json(), "moe": described.moe.to_dict()}
    check_same_model(json.loads(json.dumps(state)), HuggingFace(described), folder)
    set_config(folder, num_key_value_heads=4)
    other = HuggingFace(hf_model.describe(folder, 8))
    with pytest.raises(UserError, match="its num_key_value_heads is 2, this model's is 4"):
        check_same_model(state, other, folder)
