"""Scores of the lm-eval harness: of a Mixtral, of the same in the built-in model, and of the export of that.

The tasks are written by the test, in MMLU's form, and nothing is fetched.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from openlm_moe import MoEConfig, UserError
from openlm_moe.data.tokenizer import train_byte_bpe
from openlm_moe.evaluate_tasks import build_parser, evaluate_tasks, find_tasks, main
from openlm_moe.hosts.builtin.params import ModelParams
from openlm_moe.parallel import Checkpointer

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.0")

LAYERS, HIDDEN, EXPERTS, QUESTIONS = 2, 44, 6, 24
TASKS = ("tiny_mmlu_colours", "tiny_mmlu_numbers")
WORDS = "red green blue one two three four seven stone river moon paper which of these is not a colour number".split()
END = "<|endoftext|>"
# MMLU's template as the harness ships it, with local files in place of the hub's data set and spaces for line ends.
TEMPLATE = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/{name}_test.jsonl
    dev: {folder}/{name}_dev.jsonl
task: {name}
test_split: test
fewshot_split: dev
fewshot_config:
  sampler: first_n
num_fewshot: 2
output_type: multiple_choice
doc_to_text: >-
  {{{{question.strip()}}}}
  A. {{{{choices[0]}}}} B. {{{{choices[1]}}}} C. {{{{choices[2]}}}} D. {{{{choices[3]}}}} Answer:
doc_to_choice: ["A", "B", "C", "D"]
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""
GROUP = "group: tiny_mmlu\ntask:\n  - {}\n  - {}\naggregate_metric_list:\n  - metric: acc\n    weight_by_size: true\n"
WRITING = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/tiny_mmlu_colours_test.jsonl
task: tiny_writing
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 6
  do_sample: false
metric_list:
  - metric: exact_match
"""


def questions(seed, count):
    generator = torch.Generator().manual_seed(seed)

    def words(n):
        return [WORDS[i] for i in torch.randperm(len(WORDS), generator=generator)[:n]]

    return [
        {
            "question": " ".join(words(3 + number % 4)),
            "choices": words(4),
            "answer": int(torch.randint(4, (), generator=generator)),
        }
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with two MMLU-shaped tasks, a group of them, and one that writes text."""
    folder = tmp_path_factory.mktemp("tasks")
    for seed, name in enumerate(TASKS):
        for split, count in (("test", QUESTIONS), ("dev", 3)):
            rows = questions(10 * seed + (split == "dev"), count)
            (folder / f"{name}_{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(TEMPLATE.format(folder=folder, name=name))
    (folder / "tiny_mmlu.yaml").write_text(GROUP.format(*TASKS))
    (folder / "tiny_writing.yaml").write_text(WRITING.format(folder=folder))
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A tiny random Mixtral with a tokenizer, as a Hugging Face folder."""
    from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("mixtral")
    train_byte_bpe([" ".join(WORDS)] * 50, 300, folder / "bpe.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "bpe.json"), eos_token=END, pad_token=END)
    (folder / "bpe.json").unlink()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        num_local_experts=EXPERTS,
        rope_theta=1e4,
        initializer_range=0.3,  # decided answers: no near-ties
        eos_token_id=0,
        pad_token_id=0,
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def native_weights(stacked):
    """The built-in model's tensors, from transformers' own (5.x) names and shapes of a Mixtral."""
    out = {
        "tok_embeddings.weight": stacked["model.embed_tokens.weight"],
        "norm.weight": stacked["model.norm.weight"],
        "output.weight": stacked["lm_head.weight"],
    }
    for layer in range(LAYERS):
        theirs, ours = f"model.layers.{layer}.", f"layers.{layer}."
        projections = [stacked[f"{theirs}self_attn.{part}_proj.weight"] for part in "qkv"]
        out[f"{ours}attention.in_proj.weight"] = torch.cat(projections)
        out[f"{ours}attention.out_proj.weight"] = stacked[f"{theirs}self_attn.o_proj.weight"]
        out[f"{ours}attention_norm.weight"] = stacked[f"{theirs}input_layernorm.weight"]
        out[f"{ours}ffn_norm.weight"] = stacked[f"{theirs}post_attention_layernorm.weight"]
        out[f"{ours}feed_forward.router.weight"] = stacked[f"{theirs}mlp.gate.weight"]
        out[f"{ours}feed_forward.experts.w1"] = stacked[f"{theirs}mlp.experts.gate_up_proj"].transpose(1, 2)
        out[f"{ours}feed_forward.experts.w2"] = stacked[f"{theirs}mlp.experts.down_proj"].transpose(1, 2)
    return {name: value.detach().clone() for name, value in out.items()}


@pytest.fixture(scope="module")
def native(original, tmp_path_factory):
    """The Mixtral's weights as a checkpoint of the trainer, with the tokenizer's files in the run's folder."""
    from transformers import MixtralForCausalLM

    run = tmp_path_factory.mktemp("native")
    state = MixtralForCausalLM.from_pretrained(original).state_dict()
    shape = {"dim": 32, "n_layers": LAYERS, "n_heads": 4, "n_kv_heads": 2, "seq_len": 256, "vocab_size": 320}
    params = ModelParams(**shape, model_norm="rms_norm")
    moe = MoEConfig(EXPERTS, 2, every=1, ffn="swiglu", ffn_dim=HIDDEN, normalize_weights=True)
    writer = Checkpointer(run / "checkpoints", asynchronous=False)
    record = {"step": 0, "model": params.to_json(), "moe": moe.to_dict()}
    writer.write(0, {"model": native_weights(state)}, record)
    writer.close()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(original / name, run / name)
    return run


def scores(folder, tasks, names="tiny_mmlu", *more):
    flags = ["--model-dir", folder, "--tasks", names, "--include-path", tasks, "--batch-size", 5, *more]
    return evaluate_tasks(build_parser().parse_args(list(map(str, flags))))


def by_question(results):
    """(task, question) -> (log-likelihoods of A, B, C, D; accuracy)."""
    return {
        (task, sample["doc_id"]): ([float(answer[0]) for answer in sample["filtered_resps"]], sample["acc"])
        for task in TASKS
        for sample in results["samples"][task]
    }


def test_original_and_native_answer_every_question_alike(original, native, tasks):
    want, got = by_question(scores(original, tasks)), by_question(scores(native, tasks))
    assert want.keys() == got.keys() and len(want) == 2 * QUESTIONS
    for question, (likelihoods, accuracy) in want.items():
        assert got[question][0] == pytest.approx(likelihoods, rel=1e-5)
        assert got[question][1] == accuracy
    right = sum(accuracy for _, accuracy in want.values())
    assert 0 < right < len(want)
    chosen = {max(range(4), key=likelihoods.__getitem__) for likelihoods, _ in want.values()}
    assert len(chosen) > 1  # it answers by what it reads


def test_the_round_trip_answers_every_question_alike(original, tasks, tmp_path):
    from openlm_moe.convert.__main__ import COMMANDS
    from openlm_moe.convert.__main__ import main as convert

    if not {"hf-to-openlm", "openlm-to-hf"} <= COMMANDS.keys():
        pytest.skip("no converter between Hugging Face and our checkpoints in this version")
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert convert(["hf-to-openlm", str(original), str(ours)]) == 0
    assert convert(["openlm-to-hf", str(ours), str(back)]) == 0
    want = by_question(scores(original, tasks))
    for folder in (ours, back):
        got = by_question(scores(folder, tasks))
        assert got.keys() == want.keys()
        for question, (likelihoods, accuracy) in want.items():
            assert got[question][0] == pytest.approx(likelihoods, rel=1e-5)
            assert got[question][1] == accuracy


def test_another_model_answers_otherwise(original, tasks, tmp_path):
    """The comparison above can fail: one expert's gate and up halves swapped, as a wrong layout would."""
    other = shutil.copytree(original, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
            gate, up = weights[f"{name}w1.weight"], weights[f"{name}w3.weight"]
            weights |= {f"{name}w1.weight": up, f"{name}w3.weight": gate}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    want, got = by_question(scores(original, tasks)), by_question(scores(other, tasks))
    assert any(got[question][1] != accuracy for question, (_, accuracy) in want.items())


def test_native_and_original_write_alike(original, native, tasks):
    for batch in (1, 5):
        texts = []
        for folder in (original, native):
            results = scores(folder, tasks, "tiny_writing", "--batch-size", batch, "--limit", 6)
            texts.append([sample["filtered_resps"] for sample in results["samples"]["tiny_writing"]])
        assert texts[0] == texts[1] and len(texts[0]) == 6
        assert len({text for (text,) in texts[0]}) > 1


def test_the_command_prints_the_table_and_writes_every_answer(native, tasks, tmp_path, capsys):
    output = tmp_path / "scores.json"
    flags = ["--model-dir", native, "--tasks", "tiny_mmlu", "--include-path", tasks, "--limit", 4, "--output", output]
    assert main(list(map(str, flags))) == 0
    printed = capsys.readouterr().out
    assert "tiny_mmlu_colours" in printed and "|acc" in printed.replace(" ", "")
    assert "Tasks" in printed and "Stderr" in printed  # what older pytablewriters leave out
    written = json.loads(output.read_text())
    assert [len(written["samples"][name]) for name in TASKS] == [4, 4]
    assert written["results"]["tiny_mmlu"]["acc,none"] == pytest.approx(
        sum(sample["acc"] for name in TASKS for sample in written["samples"][name]) / 8
    )


def refusal(capsys, *flags):
    assert main(list(map(str, flags))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_mistakes_are_told_in_one_line(original, native, tasks, tmp_path, capsys):
    usual = ("--include-path", tasks, "--tasks", "tiny_mmlu")
    assert "--model-dir nowhere is no folder" in refusal(capsys, "--model-dir", "nowhere", *usual)
    assert "--limit is 0; it must be 1 or more" in refusal(capsys, "--model-dir", original, *usual, "--limit", 0)
    assert "holds no complete checkpoint" in refusal(capsys, "--model-dir", tmp_path, *usual)
    bare = shutil.copytree(native, tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    assert "there is no tokenizer.json in" in refusal(capsys, "--model-dir", bare, *usual)
    assert "there is no tokenizer.json in nowhere" in refusal(
        capsys, "--model-dir", original, *usual, "--tokenizer", "nowhere"
    )
    (bare / "checkpoints" / "step_0000000" / "state.json").write_text('{"step": 0, "model": {"family": "mixtral"}}')
    assert "is of a Hugging Face model; give the folder" in refusal(capsys, "--model-dir", bare, *usual)


def test_a_tokenizer_file_can_be_named(original, native, tasks, tmp_path):
    bare = shutil.copytree(native, tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    want = by_question(scores(native, tasks, "tiny_mmlu", "--limit", 3))
    got = by_question(scores(bare, tasks, "tiny_mmlu", "--limit", 3, "--tokenizer", original / "tokenizer.json"))
    assert got == want


def test_a_run_on_the_embedded_corpus_finds_its_tokenizer(tmp_path):
    from openlm_moe.data.corpus import embedded_tokenizer
    from openlm_moe.data.tokenizer import load_encoder
    from openlm_moe.interop.lm_eval import load_tokenizer

    file = embedded_tokenizer()
    record = {"corpus": {"tokenizer_sha256": load_encoder(file).digest}}
    (tmp_path / "params.json").write_text(json.dumps(record))
    found = load_tokenizer(None, [tmp_path])
    text = "def read(self, size=-1):"
    assert found.encode(text) == load_encoder(file).tokenizer.encode(text).ids
    assert found.eos_token_id == load_encoder(file).end_id
    (tmp_path / "params.json").write_text('{"corpus": {"tokenizer_sha256": "0"}}')
    with pytest.raises(UserError, match="another tokenizer than"):
        load_tokenizer(None, [tmp_path])


@pytest.mark.slow  # the harness reads some ten thousand files
def test_unknown_task_names_the_nearest(tasks):
    """Among the harness's own tasks, which are read only where the folder's do not do."""
    with pytest.raises(UserError, match="'mmlu_anatomie', which the harness does not know; did you mean mmlu_anatomy"):
        find_tasks("tiny_mmlu,mmlu_anatomie", tasks)


def test_a_missing_extra_is_named(original, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else find(name))
    with pytest.raises(UserError, match=r'accelerate is not installed: pip install "openlm-moe\[eval\]"'):
        evaluate_tasks(build_parser().parse_args(["--model-dir", str(original), "--tasks", "mmlu"]))
