"""configs/grafana.json: a dashboard whose every query names metrics and labels that a running gateway shows."""

import json
import re
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from gateway_server import HTTP, running_gateway
from running_app import running_app

from distill.engines.protocol.counters import Page, parse_page

DASHBOARD = json.loads((Path(__file__).parents[3] / "configs" / "grafana.json").read_text(encoding="utf-8"))
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
# vLLM 0.32 at vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py.
OF_VLLM = {
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:time_to_first_token_seconds",
    "vllm:e2e_request_latency_seconds",
}
METRIC = re.compile(r"\b(?:vllm:|understudy_)\w+")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The metrics of a gateway that answered and refused."""
    prompt = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    with (
        running_app(FakeEngine(name="a", usage=True).app()) as engine,
        running_gateway(tmp_path_factory.mktemp("log"), engine) as url,
    ):
        for more in ({}, {"stream": True}, {"user": "400"}, {"n": 2}):
            HTTP.post(f"{url}/v1/chat/completions", json=prompt | more)
        return parse_page(HTTP.get(f"{url}/metrics").text)


def test_every_metric_of_a_query_is_on_the_gateways_page(page: Page) -> None:
    named = {name for query in QUERIES for name in METRIC.findall(query)}
    # A metric whose labels were never set has no sample yet.
    unset = {"understudy_unhandled_total"}
    missing = {name for name in named if name.removesuffix("_total") not in page}
    assert missing <= unset, missing
    assert len(named) > len(OF_VLLM)


def test_every_label_of_a_query_is_on_its_metrics(page: Page) -> None:
    for query in QUERIES:
        matched = {label for group in re.findall(r"\{(.*?)\}", query) for label in re.findall(r"(\w+)=", group)}
        grouped = {word.strip() for group in re.findall(r"by \((.*?)\)", query) for word in group.split(",")}
        for name in METRIC.findall(query):
            samples = page.get(name.removesuffix("_total"), [])
            known = {label for labels, _ in samples for label in labels}
            assert not samples or matched <= known, query
        known = {
            label
            for name in METRIC.findall(query)
            for labels, _ in page.get(name.removesuffix("_total"), [])
            for label in labels
        }
        assert grouped <= known, query


def test_metrics_named_as_vllms_exist_in_vllm(page: Page) -> None:
    families = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in page if name.startswith("vllm:")}
    assert families == OF_VLLM


def test_the_dashboard_has_what_grafana_requires() -> None:
    """The keys that jsonschema/dashboard.jsonschema.json of grafana/grafana-foundation-sdk (f178d5a4) requires, and a sound grid."""
    assert type(DASHBOARD["schemaVersion"]) is int
    assert DASHBOARD.keys() >= {"schemaVersion", "templating", "annotations", "title", "uid", "time", "panels"}
    assert {"name", "type", "query"} <= DASHBOARD["templating"]["list"][0].keys()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) == 9
    for panel in DASHBOARD["panels"]:
        (variable,) = DASHBOARD["templating"]["list"]
        assert panel["datasource"] == {"type": "prometheus", "uid": f"${{{variable['name']}}}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert sorted(set(letters)) == letters
    for query in QUERIES:
        assert query.count("(") == query.count(")")
