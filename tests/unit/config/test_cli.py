"""Flags to a RunConfig: every section flat, providers' own flags, messages, help."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo import registry
from mimo.config import toml_file
from mimo.config.cli import FIRST_FLAGS, parse, parse_as, to_toml
from mimo.config.flag_hints import FOREIGN_FLAGS
from mimo.config.optim import OptimConfig
from mimo.config.rl_run import FIRST_FLAGS as RL_FIRST_FLAGS
from mimo.config.rl_run import RlRunConfig
from mimo.config.trainer import RunConfig, TrainConfig
from tests.unit.config.fake_provider import FakeDataConfig, FakeModelConfig

ROOT = Path(__file__).parents[3]
FAKE = ["--model-provider", "tests.unit.config.fake_provider:model",
        "--dataset-provider", "tests.unit.config.fake_provider:dataset"]


def parsed(*flags: str) -> RunConfig:
    return parse([*FAKE, *flags])


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_without_flags_every_field_has_its_default():
    config = parsed()
    defaults = RunConfig(model=config.model, data=config.data, model_family=FakeModelConfig(), dataset=FakeDataConfig())
    assert config == defaults


def test_flags_of_every_section_and_of_both_providers_are_flat():
    config = parsed("--micro-batch-size", "3", "--encoder_tp=2", "--lr", "1", "--lr", "1e-3", "--lr-decay-style", "WSD",
                    "--overlap-grad-reduce", "--no-progress", "--num-layers", "7", "--num-digits", "2")
    assert config.train.micro_batch_size == 3
    assert config.layout.encoder_tp == 2
    assert config.optim.lr == 1e-3, "the last one"
    assert config.schedule.lr_decay_style == "WSD"
    assert config.ddp.overlap_grad_reduce is True
    assert config.observe.progress is False
    assert config.model_family.num_layers == 7
    assert config.dataset.num_digits == 2


def test_files_apply_left_to_right_and_flags_win(tmp_path):
    first = write(tmp_path / "a.toml", 'micro-batch-size = 2\nseq_length = 64\ntrain_iters = 5\n[model]\nlr = 1\n')
    second = write(tmp_path / "b.toml", '[train.data]\nseq-length = 128\nnum_layers = 3\nbf16 = false\n')
    config = parsed("--config", first, f"--config={second}", "--micro-batch-size", "8")
    assert config.train.micro_batch_size == 8
    assert config.train.seq_length == 128
    assert config.train.train_iters == 5
    assert config.optim.lr == 1.0 and isinstance(config.optim.lr, float)
    assert config.model_family.num_layers == 3
    assert config.model.bf16 is False


def test_none_unsets_what_a_file_has_set(tmp_path):
    path = write(tmp_path / "a.toml", "train-iters = 5\n")
    config = parsed("--config", path, "--train-iters", "none", "--train-samples", "9")
    assert config.train == TrainConfig(train_samples=9)


def test_a_file_can_name_the_providers_and_a_flag_overrides_them(tmp_path):
    path = write(tmp_path / "a.toml", 'model-provider = "nowhere:model"\ndataset-provider = "nowhere:data"\n')
    assert isinstance(parsed("--config", path).model_family, FakeModelConfig)
    with pytest.raises(ValueError, match=r"--model-provider nowhere:model: there is no module 'nowhere'"):
        parse(["--config", path])
    later = write(tmp_path / "b.toml", f'model-provider = "{FAKE[1]}"\ndataset-provider = "{FAKE[3]}"\n')
    assert isinstance(parse(["--config", path, "--config", later]).model_family, FakeModelConfig)


def test_the_model_of_hf_config_decides_the_family_unless_a_flag_does(tmp_path):
    provider = registry.model_provider("qwen3_vl")
    (tmp_path / "config.json").write_text(json.dumps(provider.hf_config(provider.Config())))
    for path in (tmp_path, tmp_path / "config.json"):
        config = parse(["--hf-config", str(path), "--dataset-provider", "mock"])
        assert (config.model.model_provider, type(config.model_family)) == ("qwen3_vl", provider.Config)
    config = parse(["--hf-config", str(tmp_path), "--model-provider", "llava", "--dataset-provider", "mock"])
    assert config.model.model_provider == "llava", "which refuses the file later"
    for unreadable in ("{", "[]", "{}", '{"architectures": 5}'):
        (tmp_path / "config.json").write_text(unreadable)
        assert parse(["--hf-config", str(tmp_path), "--dataset-provider", "mock"]).model.model_provider == "llava"
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ValueError, match=f"--hf-config {tmp_path} names the architecture GPT2LMHeadModel, of no built"):
        parse(["--hf-config", str(tmp_path), "--dataset-provider", "mock"])
    assert parse(["--hf-config", str(tmp_path), "--model-provider", "causal_lm", "--dataset-provider", "mock"])


def test_hf_config_replaces_sizes_of_files_and_refuses_those_of_the_command_line(tmp_path):
    provider = registry.model_provider("causal_lm")
    own = provider.Config(num_layers=3, qk_layernorm=True)
    (tmp_path / "config.json").write_text(json.dumps(provider.hf_config(own)))
    recipe = write(tmp_path / "a.toml", "num-layers = 5\n")
    words = ["--model-provider", "causal_lm", "--dataset-provider", "mock", "--hf-config", str(tmp_path)]
    kept = parse([*words, "--config", recipe, "--num-layers=3", "--qk-layernorm", "--hidden-dropout", "0.1"])
    assert provider.resolved(kept.model_family).num_layers == 3 and kept.model_family.hidden_dropout == 0.1
    assert provider.resolved(parse([*words, "--config", recipe]).model_family).num_layers == 3
    for flags, expected in ((["--num_layers", "2"], "--num-layers (3)"),
                            (["--num-layers=4", "--no-qk-layernorm"], "--num-layers (3), --qk-layernorm (True)")):
        message = f"--hf-config {tmp_path} has another value for {expected}: leave these flags out"
        with pytest.raises(ValueError, match=re.escape(message)):
            parse([*words, *flags])


def test_pretrained_weights_need_a_data_set_by_name(tmp_path):
    for flag in ("--load-hf", "--load-language-from"):
        with pytest.raises(ValueError, match=f"^{flag} {tmp_path} needs --dataset-provider: the default, digits, has"):
            parse([flag, str(tmp_path)])
    file = tmp_path / "run.toml"
    file.write_text('dataset-provider = "digits"')
    assert parse(["--load-hf", str(tmp_path), "--config", str(file)]).data.dataset_provider == "digits"
    # Sums in the model's own tokens.
    words = ["--model-provider", "causal_lm", "--load-hf", str(tmp_path)]
    assert parse_as(RlRunConfig, [*words, "--tokenizer", str(tmp_path)], "").data.dataset_provider == "arithmetic"
    with pytest.raises(ValueError, match="needs --dataset-provider: the default, arithmetic, has"):
        parse_as(RlRunConfig, words, "")


def test_a_file_cannot_choose_the_family_by_values_that_are_no_names(tmp_path):
    for line, expected in (("hf-config = 5", "hf-config = 5: "), ('model-provider = ""', "--model-provider : unknown")):
        path = write(tmp_path / "a.toml", f"{line}\n")
        with pytest.raises(ValueError, match=expected):
            parse(["--config", path, "--dataset-provider", "mock"])


def test_unknown_keys_are_listed_together_with_the_nearest_names(tmp_path):
    first = write(tmp_path / "a.toml", "micro-batch-sze = 2\nseq_length = 8\n")
    second = write(tmp_path / "b.toml", "zzzzz = 1\nlearning-rate = 1\n[optim]\nwieght_decay = 2\n")
    with pytest.raises(ValueError) as caught:
        parsed("--config", first, "--config", second)
    message = str(caught.value)
    assert f"micro-batch-sze in {first} (did you mean micro-batch-size" in message
    assert f"zzzzz in {second}" in message and f"learning-rate in {second} (it is not a flag here: use --lr)" in message
    assert f"wieght-decay in {second} (did you mean weight-decay" in message
    assert "seq-length" not in message


@pytest.mark.parametrize(("text", "expected"), [
    ('seq-length = "long"', "seq-length = 'long': expected an integer"),
    ("seq-length = 1.5", "seq-length = 1.5: expected an integer"),
    ("seq-length = true", "seq-length = True: expected an integer"),
    ("bf16 = 1", "bf16 = 1: expected true or false"),
    ('layout = "ring"', "layout = 'ring': expected one of disjoint, colocated"),
    ('train-iters = "many"', "train-iters = 'many': expected an integer"),
    ("patch-sizes = [1, 2.5]", "patch-sizes = [1, 2.5]: expected an integer"),
    ("lr = 2\n[optim]\nlr = 3", "lr is set twice"),
    ("lr = ", "not valid TOML"),
    ("[optimzer]\nlr = 2", "there is no table [optimzer]; did you mean [optimizer]?"),
    ("[train.qqq]\nlr = 2", "there is no table [qqq]; known tables are checkpoint, data, dataset"),
])
def test_a_bad_file_is_named_with_the_key_and_what_was_expected(tmp_path, text, expected):
    path = write(tmp_path / "bad.toml", text)
    with pytest.raises(ValueError) as caught:
        parsed("--config", path)
    assert f"--config {path}: " in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(("flag", "expected"), [
    ("--learning-rate=1", "--learning-rate is not a flag here: use --lr"),
    ("--learning_rate=1", "--learning-rate is not a flag here: use --lr"),
    ("--freeze-projection", "use --freeze projector"),
    ("--dynamic-resolution-min-patches=4", "use --min-patches of the energon data set"),
    ("--no-dynamic-resolution", "--no-dynamic-resolution is not a flag here: use --vision-dynamic-resolution"),
    ("--accumulate-allreduce-grads-in-fp32", "use --grad-reduce-in-fp32, which is on by default"),
    ("--calculate-per-token-loss", "always on"),
    ("--mtp-num-layers=0", "--hybrid-layer-pattern has the layers of each depth"),
    ("--data-path=x", "--data-path belongs to --dataset-provider conversations, energon"),
    ("--engine-tp=2", "--engine-tp belongs to train_rl.py"),
    ("--gsm8k-thinking", "--gsm8k-thinking belongs to train_rl.py --dataset-provider gsm8k"),
])
def test_flags_of_megatron_and_of_other_providers_get_a_hint(flag, expected):
    with pytest.raises(ValueError) as caught:
        parse([flag, "--train-iters", "1"])
    assert expected in str(caught.value)


def test_hints_name_flags_that_exist():
    owned = {name for run in (RunConfig(), RlRunConfig()) for field in dataclasses.fields(run)
             if (section := getattr(run, field.name)) is not None for name in toml_file.typed_fields(type(section))}
    providers = [registry.model_provider(name) for name in registry.MODEL_PROVIDERS]
    providers += [registry.dataset_provider(name) for name in registry.DATASET_PROVIDERS]
    owned |= {name for provider in providers for name in toml_file.typed_fields(provider.Config)}
    for flag, hint in FOREIGN_FLAGS.items():
        assert toml_file.field_name(flag) not in owned, f"{flag} exists"
        for named in re.findall(r"--[a-z0-9-]+", hint):
            name = toml_file.field_name(named)
            assert {name, name.removeprefix("no_")} & owned, f"{flag}: there is no {named}"


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"--config nowhere\.toml: No such file"):
        parsed("--config", "nowhere.toml")


@pytest.mark.parametrize(("provider", "expected"), [
    (["--model-provider", "lava"], "lava: unknown; built in are causal_lm, deepseek_v3, llava, llava_next, mock"),
    ([*FAKE[:2], "--dataset-provider", "digit"],
     "--dataset-provider digit: unknown; built in are arithmetic, conversations"),
    ("clashing", "--seq-length is a field of both mimo.config.trainer.TrainConfig and "
                 "tests.unit.config.fake_provider.ClashingConfig"),
    ("required", "field 'width' of its Config has no default"),
    ("no_config", "has no Config dataclass"),
    ("absent", "has no attribute 'absent'"),
])
def test_a_provider_that_cannot_be_used_is_named(provider, expected):
    with pytest.raises(ValueError) as caught:
        parse(["--model-provider", f"tests.unit.config.fake_provider:{provider}", *FAKE[2:]] if isinstance(
            provider, str) else provider)
    assert expected in str(caught.value)


@pytest.mark.parametrize("flags", [["--micro-batch-siz", "3"], ["--micro-batch-size", "three"], ["--layout", "ring"],
                                   ["--config"], ["stray"]])
def test_a_flag_that_cannot_be_read_exits_with_2_and_a_message(flags, capsys):
    with pytest.raises(SystemExit) as caught:
        parsed(*flags)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and flags[0] in error
    assert flags[0] != "--micro-batch-siz" or "--micro-batch-size INT" in error, "the nearest"


def test_ranks_other_than_0_say_nothing(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    for flags in (["--no-such-flag"], ["--help"], ["--help", "all"], ["--print-config"]):
        with pytest.raises(SystemExit):
            parsed(*flags)
    assert capsys.readouterr() == ("", "")


def test_print_config_round_trips(tmp_path, capsys):
    flags = ["--train-iters", "7", "--rope-base", "none", "--answer", 'tab\t "quoted" \\ \u00e9 \U0001f600 \x7f',
             "--no-bf16", "--patch-sizes", "4", "8", "--freeze", "vision,projector", "--adam-eps", "1e-8"]
    with pytest.raises(SystemExit) as caught:
        parsed(*flags, "--print-config")
    assert caught.value.code == 0
    path = write(tmp_path / "printed.toml", capsys.readouterr().out)
    assert parse(["--config", path]) == parsed(*flags)


@pytest.fixture(scope="module")
def defaults() -> RunConfig:
    return parsed()


@settings(max_examples=15, deadline=None)
@given(answer=st.text(st.characters(exclude_categories=["Cs"])), lr=st.floats(1e-30, 1e30),
       rope=st.none() | st.floats(1, 9),
       iters=st.none() | st.integers(1, 10**12), patches=st.lists(st.integers(), max_size=4), bf16=st.booleans())
def test_any_config_survives_a_file(tmp_path_factory, defaults, answer, lr, rope, iters, patches, bf16):
    config = dataclasses.replace(
        defaults, train=TrainConfig(train_iters=iters), optim=OptimConfig(lr=lr),
        model=dataclasses.replace(defaults.model, bf16=bf16), dataset=FakeDataConfig(answer=answer),
        model_family=FakeModelConfig(patch_sizes=tuple(patches), rope_base=rope))
    path = write(tmp_path_factory.mktemp("toml") / "run.toml", to_toml(config))
    assert parse(["--config", path]) == config


def test_help_opens_with_ten_flags_that_exist_and_reads_nothing(capsys):
    for run_type, first_flags in ((RunConfig, FIRST_FLAGS), (RlRunConfig, RL_FIRST_FLAGS)):
        with pytest.raises(SystemExit) as caught:
            parse_as(run_type, ["--config", "no such file", "--help"], "Train.", first_flags)
        assert caught.value.code == 0
        text = capsys.readouterr().out
        assert len(first_flags) == 10 and all(flag in text for flag in first_flags) and "--help all" in text
        assert len(text.splitlines()) < 40
        names = {toml_file.flag_name(name) for section in vars(run_type()).values() if section is not None
                 for name in toml_file.typed_fields(type(section))}
        assert {flag.split()[0] for flag in first_flags} - {"--config"} <= names


def test_help_all_has_every_flag_under_the_title_of_its_section(capsys):
    with pytest.raises(SystemExit) as caught:
        parsed("--help", "all")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    # A box starts at the line with its title.
    boxes = dict(re.findall(r"^\S* ?(\S+) options [^\w]*$(.*?)(?=^\S* ?\S+ options [^\w]*$|\Z)", text, re.M | re.S))
    config = parsed()
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        box = boxes[section.name.replace("_", "-")]
        assert (type(value).__doc__ or "").split(",")[0].split()[0] in box
        for field in dataclasses.fields(value):
            assert toml_file.flag_name(field.name) in box, field.name
    assert "{None}" not in text
    assert "--config" in text and "--print-config" in text
