"""The configuration: read, overridden, refused with a line that helps, written back."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refused

from data.prompts.prompt import PromptSource
from distill.config.load import dump_config, load_config, parse_config
from distill.config.run import RunConfig
from speculative.measure.metrics import CURVE_GAMMAS

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SHIPPED = sorted(path for path in CONFIGS.glob("*.yaml"))
MINIMAL = "name: x\ndata:\n  train:\n    - {path: stdlib}\n"


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def tree_of(**sections: Any) -> dict[str, Any]:
    return {"name": "x", "data": {"train": [{"path": "stdlib"}]}, **sections}


# --- shipped files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_config_loads(path: Path) -> None:
    config = load_config(path)
    assert config.name
    # 32 prompts of a model of 135 M take two minutes on two cores; its verdict decodes them all.
    live = "end" if config.name == "smollm2" else "checkpoint"
    assert (config.judge.live, config.judge.live_prompts) == (live, 32), "each proves its checkpoints"
    assert load_config(path, ["optim.lr=3e-4", "loss.name=ce"]).optim.lr == 3e-4


# --- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("3E-4", 3e-4), ("1e4", 1e4), ("5e+3", 5e3), ("1.5e-3", 1.5e-3), (".5", 0.5), ("2", 2.0)],
)
def test_numbers_as_people_write_them(tmp_path: Path, text: str, value: float) -> None:
    assert load_config(write(tmp_path, MINIMAL + f"optim: {{lr: {text}}}\n")).optim.lr == value
    assert load_config(write(tmp_path, MINIMAL), [f"optim.lr={text}"]).optim.lr == value


@pytest.mark.parametrize(
    ("quoted", "said"),
    [(quoted, "number") for quoted in ('"1e-4"', "'0.1'", "fast", "1e-4.5", "true", "[1]", ".inf", ".nan")]
    + [(quoted, "greater than 0") for quoted in ("-1e-4", "0")],
)
def test_a_learning_rate_that_is_no_positive_number_is_refused(tmp_path: Path, quoted: str, said: str) -> None:
    text = refused(lambda: load_config(write(tmp_path, MINIMAL + f"optim: {{lr: {quoted}}}\n")))
    assert "config.yaml" in text
    assert "`optim.lr`" in text
    assert said in text


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("{url: 'http://a/v1'}", "`target.endpoint.url` is retired; write target.endpoint.urls: [ADDRESS]"),
        ("{urls: []}", "`target.endpoint.urls` = []"),
        ("{urls: ['a:8000']}", "a:8000 is not an address; write e.g. http://127.0.0.1:8000/v1"),
        ("{urls: ['http://a/v1', 'http://a/v1/']}", "an address is listed twice"),
        ("{urls: ['http://a/v1'], weights: server}", "a draft cannot be carved without the target's weights"),
    ],
)
def test_addresses_of_servers_are_checked_before_they_are_asked(tmp_path: Path, endpoint: str, said: str) -> None:
    path = write(tmp_path, MINIMAL)
    assert said in refused(lambda: load_config(path, [f"target.endpoint={endpoint}"]))
    both = load_config(path, ["target.endpoint.urls=['http://a/v1','http://b:1/v1']"])
    assert both.target.endpoint is not None
    assert (both.target.at_server, both.target.endpoint.url) == (False, "http://a/v1"), "the weights are here"


def test_text_that_looks_like_a_number_stays_text_in_a_name(tmp_path: Path) -> None:
    assert "`name`" in refused(lambda: load_config(write(tmp_path, MINIMAL), ["name=1e5"]))
    assert load_config(write(tmp_path, MINIMAL), ['name="1e5"']).name == "1e5"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"a: [1", "not YAML"),
        (b"name: x\n\tlr: 3\n", "line 2"),
        (b"name: !!python/object:os.system 1\n", "not YAML"),
        (b"name: \xff\xfe\n", "UTF-8"),
        (
            b"serving: {top_k: 1}\r\nname: x\r\nserving:\r\n  top_k: 2\r\n",
            "line 3 is not YAML: the key `serving` is also in line 1",
        ),
        (
            b'serving:\n  top_k: 1\n  top_p: 1.0\n  "top_k": 2\n',
            "line 4 is not YAML: the key `top_k` is also in line 2",
        ),
        (b"data: {train: [{path: x}, {path: y, limit: 1, path: z}]}\n", "the key `path` is also in line 1"),
        (b"", "key: value"),
        (b"just words\n", "str"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: bytes, said: str) -> None:
    message = refused(lambda: load_config(write(tmp_path, text)))
    assert said in message
    assert "config.yaml" in message


def test_a_place_in_a_list_is_written_in_ascii(tmp_path: Path) -> None:
    assert "data.train has no keys below it" in refused(
        lambda: load_config(write(tmp_path, MINIMAL), ["data.train.\N{SUPERSCRIPT TWO}=1"])
    )


def test_a_key_twice_in_an_override_is_refused_and_a_merge_may_replace_a_key(tmp_path: Path) -> None:
    text = refused(lambda: load_config(write(tmp_path, MINIMAL), ["serving={top_k: 1, top_k: 2}"]))
    assert text.startswith("override 'serving={top_k: 1, top_k: 2}': ")
    assert "the key `top_k`" in text
    merged = "optim: &first {lr: 1.0e-3}\nserving:\n  <<: {top_k: 1, top_p: 0.5}\n  top_k: 2\n"
    assert load_config(write(tmp_path, MINIMAL + merged)).serving.top_k == 2


def test_a_missing_file_names_the_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    text = refused(lambda: load_config("configs/dmo.yaml"))
    assert "configs/dmo.yaml" in text
    assert "configs/demo.yaml" in text
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/demo.yaml") == load_config(CONFIGS / "demo.yaml")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.yaml").write_text("name: mine", encoding="utf-8")
    assert "configs/demo.yaml: `data` is missing" in refused(lambda: load_config("configs/demo.yaml"))
    assert "cannot read" in refused(lambda: load_config(tmp_path))


# --- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "key", "near"),
    [
        ({"optm": {}}, "optm", "optim"),
        ({"optim": {"learning_rate": 1.0}}, "optim.learning_rate", None),
        ({"loss": {"tempreature": 1.0}}, "loss.tempreature", "temperature"),
        ({"student": {"lora": {"rnk": 4}}}, "student.lora.rnk", "rank"),
        (
            {"data": {"train": [{"path": "x"}, {"path": "y", "prompt_colum": "q"}]}},
            "data.train.1.prompt_colum",
            "prompt_column",
        ),
    ],
)
def test_unknown_keys_name_the_nearest(section: dict[str, Any], key: str, near: str | None) -> None:
    text = refused(lambda: parse_config(tree_of() | section, "file.yaml"))
    assert text.startswith(f"file.yaml: unknown key `{key}`")
    assert (f"did you mean `{near}`" if near else "known here: ") in text


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"train": {"steps": "10"}}, '`train.steps` = "10"'),
        ({"train": {"epochs": 1e308}}, "less than or equal to 100000"),
        ({"name": {datetime.date(2024, 1, 1): 1}}, "`name` = {}"),
        ({"train": {"steps": -1}}, "greater than or equal to 0"),
        ({"optim": None}, "`optim` = null"),
        ({"optim": "adamw"}, "key: value"),
        ({"optim": {"warmup_ratio": 1.0}}, "less than 1"),
        ({"student": {"layers": 3}}, "list"),
        ({"student": {"init": "carvd"}}, '`student.init` = "carvd": did you mean `carved`?'),
        ({"train": {"steps": 10.0}}, "integer"),
        ({"loss": {"warmup": {"ratio": 1.0}}}, "less than 1"),
        ({"name": ".x"}, "it becomes a folder"),
        ({"data": {"train": []}}, "data.train"),
        ({"student": {"architecture": {"model_type": "llama"}}}, "student.architecture"),
        ({"target": None}, "`target` = null"),
        ({"judge": {"ways": ["x"]}}, "unknown way to decode 'x': must be one of draft, early-exit, "),
        ({"student": {"lora": {"target_modules": "q_proj"}}}, "`student.lora.target_modules`"),
        ({"loss": {"name": "forwrd_kl"}}, '`loss.name` = "forwrd_kl": unknown objective: did you mean `forward_kl`?'),
        ({"loss": {"mix": {"lk": 1.0}}}, "`loss.mix.lk`"),
        ({"loss": {"warmup": {"name": "x"}}}, "known here: ce,"),
        ({"judge": {"gamma": 33}}, f"less than or equal to {CURVE_GAMMAS[-1]}"),
        ({"data": {"train": {"path": "x"}}}, "`data.train`"),
        ({3: 4}, "keys should be strings"),
        ({"data": {"train": [{}]}}, "`data.train.0.path` is missing"),
        ({"target": {"device_map": "all"}}, "`target.device_map`"),
    ],
)
def test_wrong_values_name_key_and_value(section: dict[Any, Any], said: str) -> None:
    text = refused(lambda: parse_config(tree_of() | section, "file.yaml"))
    assert text.startswith("file.yaml: ")
    assert said in text
    assert "tuple" not in text, "a word of Python, not of YAML"


@pytest.mark.parametrize("missing", ["name", "data"])
def test_a_missing_key_is_named(missing: str) -> None:
    tree = tree_of()
    del tree[missing]
    assert refused(lambda: parse_config(tree, "file.yaml")) == f"file.yaml: `{missing}` is missing"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"name": "../x"}, "it becomes a folder"),
        ({"student": {"init": "pretrained"}}, "student.path"),
        ({"student": {"path": "x"}}, "student.path"),
        ({"student": {"init": "config"}}, "student.architecture"),
        ({"train": {"batch_size": 10, "micro_batch_size": 4}}, "multiple of train.micro_batch_size"),
        ({"loss": {"mix": {}}}, "loss.mix"),
        ({"loss": {"mix": {"tv": -1.0, "ce": 1.0}}}, "loss.mix"),
        ({"judge": {"rule": "greedy"}}, "serving.temperature"),
        ({"judge": {"load": [1, 4, 4]}}, "judge.load: each number"),
        ({"judge": {"load": [1], "live": "never"}}, "judge.live: checkpoint or end"),
        ({"judge": {"latency_ms": {"per_token": 30}, "live": "never"}}, "judge.latency_ms are timed by decoding"),
        ({"judge": {"latency_ms": {"first_token": 0}}}, "judge.latency_ms.first_token"),
        ({"judge": {"latency_ms": {"total": 9}}}, "judge.latency_ms.total"),
        ({"student": {"parallel": {"tokens": 4}}}, "judge.gamma = 5 above student.parallel.tokens = 4"),
        ({"student": {"parallel": {}}, "train": {"packing": 64}}, "set train.packing to null"),
        (
            {"student": {"parallel": {}}, "data": {"train": [{"path": "x"}], "mix": {"student": 1}}},
            "student.parallel is served",
        ),
        ({"serving": {"temperature": 0}, "judge": {"rule": "sample"}}, "judge.rule"),
        ({"target": {"shard": True, "device_map": "auto"}, "judge": {"live": "end"}}, "one of the two"),
        ({"serving": {"temperature": 0.5, "rule": "greedy"}}, "judge.rule"),
        ({"serving": {"temperature": 0, "samples_per_prompt": 2}, "judge": {"rule": "greedy"}}, "samples_per_prompt"),
    ],
)
def test_impossible_pairs(section: dict[str, Any], said: str) -> None:
    assert said in refused(lambda: parse_config(tree_of() | section, "file.yaml"))


# --- overrides ---------------------------------------------------------------------------------------------------------


def test_overrides_reach_every_depth_and_win(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "optim: {lr: 0.5}\nloss: {mix: {tv: 1}}\n")
    config = load_config(
        path,
        [
            "optim.lr=3e-4",
            "data.train.0.limit=3",
            "student.lora.rank=4",
            "loss.mix={forward_kl: 1, ce: 0.5}",
            "student.layers=[0, 2]",
            "tracking.trackers=[wandb]",
            "name=y",
            "optim.lr=1e-4",
            "target.revision=a=b",
        ],
    )
    assert config.optim.lr == 1e-4
    assert config.data.train[0].limit == 3
    assert config.student.lora is not None
    assert config.student.lora.rank == 4
    assert config.loss_weights() == {"forward_kl": 1, "ce": 0.5}
    assert (config.student.layers, config.tracking.trackers, config.name) == ((0, 2), ("wandb",), "y")
    assert config.target.revision == "a=b"


def test_an_override_replaces_a_list_item_or_the_whole_list(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert load_config(path, ["data.train.0={path: a.jsonl}"]).data.train == (PromptSource(path="a.jsonl"),)
    assert len(load_config(path, ["data.train=[{path: a}, {path: b}]"]).data.train) == 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.lr", "key=value"),
        ("=3", "key=value"),
        ("--optim.lr=3", "unknown key"),
        ("optim.lrr=3", "did you mean `lr`"),
        ("optim.lr=[1", "not YAML"),
        ("train.steps=", "null"),
        ("name.deep=3", "no keys below"),
        ("data.train.5.limit=3", "data.train"),
        ("data.train.-1.limit=3", "data.train"),
    ],
)
def test_overrides_that_cannot_be_meant(tmp_path: Path, override: str, said: str) -> None:
    assert said in refused(lambda: load_config(write(tmp_path, MINIMAL), [override]))


# --- a frozen value that can be written back ---------------------------------------------------------------------------


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
trees = st.fixed_dictionaries(
    {
        "name": names,
        "output": texts,
        "seed": st.integers(0, 2**31 - 1),
        "optim": st.fixed_dictionaries({"lr": st.floats(1e-12, 1e6)}),
        "student": st.fixed_dictionaries(
            {
                "layers": st.lists(st.integers(-9, 9), min_size=1, max_size=4),
                "lora": st.none()
                | st.fixed_dictionaries({"target_modules": st.just("all-linear") | st.lists(texts, min_size=1)}),
            }
        ),
        "data": st.fixed_dictionaries(
            {
                "train": st.lists(
                    st.fixed_dictionaries({"path": texts, "domain": st.none() | texts, "system": st.none() | texts}),
                    min_size=1,
                    max_size=3,
                ),
                "template": st.fixed_dictionaries(
                    {"chat_template_kwargs": st.dictionaries(texts, st.booleans() | st.integers() | texts, max_size=2)}
                ),
            }
        ),
        "loss": st.fixed_dictionaries({"mix": st.none() | st.just({"tv": 1, "forward_kl": 0.25})}),
    }
)


@settings(max_examples=30, deadline=None)
@example(tree_of(name="1e5", target={"revision": "0E0"}, output="1_0.e3"))
@given(trees)
def test_what_is_dumped_loads_to_the_same_value(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]) -> None:
    config = parse_config(_lists(tree), "test")
    path = write(tmp_path_factory.mktemp("dumped"), dump_config(config))
    again = load_config(path)
    assert again == config
    assert dump_config(again) == dump_config(config)


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


def test_dump_is_plain_yaml_with_every_key(tmp_path: Path) -> None:
    tree = yaml.safe_load(dump_config(load_config(write(tmp_path, MINIMAL))))
    assert list(tree) == list(RunConfig.model_fields)
    assert tree["optim"]["lr"] is None  # by the draft's size
