"""The command that starts each engine with a pair, the rule that it then follows, and what its user must know.

Commands speak of `$DRAFT` and `$TARGET`, so that they survive a move. Rules are those at temperature > 0; at 0 every
engine is `greedy`. What is said of an engine was read in the version that `distill.export.engines.ENGINES` names.
"""

import json
import shlex
from typing import Any, NamedTuple

from distill.export.facts import EngineFacts
from distill.export.gguf import converter
from distill.run.verdict_record import Rival

DRAFT, TARGET = '"$DRAFT"', '"$TARGET"'


class Start(NamedTuple):
    """command: shell text or Python code. rule: how the engine so started accepts at temperature > 0."""

    command: str
    rule: str
    notes: list[str]


def places(draft: str, target: str) -> str:
    """The line that tells a shell where the pair is; `draft` and `target` are shell words."""
    return f"export DRAFT={draft} TARGET={target}"


def with_places(command: str, language: str, draft: str, target: str) -> str:
    """A command that needs nothing before it."""
    if language == "python":
        return command.replace('os.environ["DRAFT"]', repr(draft)).replace('os.environ["TARGET"]', repr(target))
    return f"{places(shlex.quote(draft), shlex.quote(target))}\n{command}"


def sampling_fields(facts: EngineFacts) -> dict[str, float | int]:
    """The measured settings as a request's JSON has them; what is off is left out."""
    if facts.sampling is None:
        return {}
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    asked = {"temperature": facts.sampling.temperature} if facts.sampling.greedy else facts.sampling.as_dict()
    return {name: value for name, value in asked.items() if value != off.get(name)}


def vllm(facts: EngineFacts) -> Start:
    speculative: dict[str, Any] = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": facts.gamma}
    notes = [
        "`draft_model` needs vLLM 0.15 or later, `draft_sample_method` a build of May 2026 or later; leave draft_tensor_parallel_size out."
    ]
    if facts.one_pass is not None:
        speculative["parallel_drafting"] = True
        notes.append(
            "`parallel_drafting`: one forward of the draft a block, by the `pard_token` of its config.json; vLLM takes model runner V1 for it."
        )
    if facts.sampled_drafts_win:
        speculative["draft_sample_method"] = "probabilistic"
        notes.insert(
            0, f"Without `draft_sample_method` (its default, rule greedy-draft) {_predicted(facts, 'greedy-draft')}."
        )
    elif facts.sampling is None or facts.sampled:
        told = f'With `"draft_sample_method":"probabilistic"` (rule sample) {_predicted(facts, "sample")}.'
        notes.insert(0, told)
    most = max((gamma for _, _, gamma in facts.gamma_by_load), default=0)
    if most and len(facts.gamma_by_load) > 1:
        speculative |= {"num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": facts.gamma_by_load}
        notes.append(
            "gamma follows the batch size: vLLM tests that with EAGLE heads, and turns it off under data parallelism."
        )
    if facts.one_pass is None:
        notes.append(
            "On model runner V2 draft steps are eager, so c is higher there: compare with VLLM_USE_V2_MODEL_RUNNER=0. "
            f"`rejection_sample_method`: `block` works on V2 alone{_block(facts)}; V1 ignores it and drafts the argmax; `fly` and "
            "`synthetic` change the text."
        )
    words = [f"vllm serve {TARGET} --speculative-config {_json_word(speculative)}"]
    if facts.draft_context:
        words.append(f"--max-model-len {facts.draft_context}")
    return Start(
        " ".join(words) + _vllm_sampling(facts), "sample" if facts.sampled_drafts_win else "greedy-draft", notes
    )


def sglang(facts: EngineFacts) -> Start:
    words = [f"python -m sglang.launch_server --model-path {TARGET}"]
    words += [f"--speculative-algorithm STANDALONE --speculative-draft-model-path {DRAFT}"]
    words += [f"--speculative-num-steps {facts.gamma} --speculative-eagle-topk 1"]
    words += [f"--speculative-num-draft-tokens {facts.gamma + 1}"]
    if facts.target_quantised and not facts.draft_quantised:
        words.append("--speculative-draft-model-quantization unquant")
    if facts.draft_context:
        words.append(f"--context-length {facts.draft_context}")
    if facts.sampling is not None:
        words.append("--sampling-defaults openai")
    notes = []
    if facts.sampling is None or facts.sampled:
        notes.append(
            "It drafts the argmax (`--speculative-use-rejection-sampling` is refused for STANDALONE); on CPU, ROCm and XPU it verifies "
            "greedily whatever the temperature: the text is not the target's there."
        )
    if facts.sampling is not None and facts.sampling.min_p and facts.sampled:
        notes.append("Verification does not apply min_p.")
    if facts.gamma_by_load:
        notes.append(
            f"No gamma per batch size for an independent draft. {_most_requests(facts)} (--max-running-requests)."
        )
    return Start(" ".join(words), "greedy-draft", notes)


def llama_cpp(facts: EngineFacts) -> Start:
    # Both beside the exported directory, and named after it, so that neither can overwrite the other or the target.
    target_gguf, draft_gguf = '"$DRAFT-target.gguf"', '"$DRAFT.gguf"'
    both = facts.together
    kinds, gamma = (
        ("ngram-simple,draft-simple", both.then_gamma or facts.gamma) if both else ("draft-simple", facts.gamma)
    )
    words = [f"llama-server -m {target_gguf} -md {draft_gguf} --spec-type {kinds} --spec-draft-n-max {gamma}"]
    if both:
        words.append(_ngram_simple(both))
    if facts.draft_context:
        words.append(f"-c {facts.draft_context}")
    notes = [
        "Builds before --spec-type have --draft-max and a confidence gate to switch off (--draft-p-min 0); newer ones end with an error at "
        "--draft-max, and their gate is off.",
        f"$LLAMA_CPP is a checkout with its requirements. The converter wants local directories (for a hub id add --remote){_tokenizer(facts)}.",
    ]
    if facts.sampling is not None and facts.sampling.greedy:
        words.append("--temp 0")
    elif facts.sampling is not None:
        one = facts.sampling
        words.append(f"--temp {one.temperature} --top-k {one.top_k} --top-p {one.top_p} --min-p {one.min_p}")
        words.append("--samplers 'temperature;top_k;top_p;min_p'")
        notes.append(
            "Its own order truncates before the temperature is applied, and its defaults are .8, top-k 40, top-p .95, min-p .05."
        )
    if both:
        notes.append(
            f"Prompt lookup stands before the draft, {_timed(both)} in our decoder; `ngram-simple` looks for n-grams of one length alone, "
            "here the shortest of the measured ones. Builds without a list in --spec-type take one of the two. `understudy readback` counts "
            "its drafted tokens as the draft's alone."
        )
    elif facts.gamma_by_load:
        notes.append(f"No gamma per batch size. {_most_requests(facts)} (--parallel).")
    lines = [
        f'to_gguf() {{ {converter(facts.pre_tokenizer)} "$@"; }}',
        f"to_gguf {TARGET} --outfile {target_gguf}",
        f"to_gguf {DRAFT} --outfile {draft_gguf}",
        " ".join(words),
    ]
    return Start("\n".join(lines), "greedy-draft", notes)


def transformers(facts: EngineFacts) -> Start:
    settings = ""
    if facts.sampling is not None:
        one = facts.sampling
        settings = (
            ", do_sample=False" if one.greedy else f", do_sample=True, temperature={one.temperature}, top_k={one.top_k}"
        )
        settings += "" if one.greedy else f", top_p={one.top_p}, min_p={one.min_p or None}"
    code = f"""import os

from transformers import AutoModelForCausalLM, AutoTokenizer

DRAFT, TARGET = os.environ["DRAFT"], os.environ["TARGET"]
tokenizer = AutoTokenizer.from_pretrained(TARGET)
target = AutoModelForCausalLM.from_pretrained(TARGET, dtype="auto")
draft = AutoModelForCausalLM.from_pretrained(DRAFT, dtype="auto")
inputs = tokenizer("Hello", return_tensors="pt")
output = target.generate(**inputs, assistant_model=draft, max_new_tokens=64{settings})
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))"""
    notes = [
        "Batch size 1 only. gamma and the confidence gate (off) are read from the directory's generation_config.json, not from "
        "generate()'s arguments.",
        "A pad id inside the text (bos is often the pad id) is hidden from the draft and lowers acceptance; "
        "pass pad_token_id=tokenizer.eos_token_id then.",
    ]
    return Start(code, "sample", notes)


def tensorrt_llm(facts: EngineFacts) -> Start:
    lines = [
        "speculative_config:",
        f"  decoding_type: {'PARD' if facts.one_pass else 'Draft_Target'}",
        f"  max_draft_len: {facts.gamma}",
        f"  speculative_model: {DRAFT}",
    ]
    if facts.one_pass:
        lines.append(f"  mask_token_id: {facts.one_pass.mask_token}")
    if facts.most_load:
        lines.append(f"  max_concurrency: {facts.most_load}")
    text = "\n".join([*lines, "disable_overlap_scheduler: true"])
    serve = f"trtllm-serve {TARGET} --config tensorrt_llm.yaml"
    serve += f" --max_seq_len {facts.draft_context}" if facts.draft_context else ""
    notes = ["Draft and target run as one model. The documentation still asks for disable_overlap_scheduler."]
    if facts.sampling is None or facts.sampled:
        notes.append(
            "`use_rejection_sampling: true` under speculative_config (a prototype, needs FlashInfer) makes it rule sample: "
            f"{_predicted(facts, 'sample')}."
        )
    if facts.gamma_by_load:
        notes.append(
            "max_concurrency switches speculation off above so many requests; the keys of draft_len_schedule (gamma per batch size) have "
            "meant `from` and `up to` in different versions."
        )
    return Start(f"cat > tensorrt_llm.yaml <<EOF\n{text}\nEOF\n{serve}", "greedy-draft", notes)


def others(facts: EngineFacts) -> list[str]:
    """A line for each engine that is told of and not judged."""
    flags = {"temperature": "--temp", "top_k": "--top-k", "top_p": "--top-p", "min_p": "--min-p"}
    sampling = "".join(f" {flags[name]} {value}" for name, value in sampling_fields(facts).items())
    gamma = facts.gamma
    mlx = f"mlx_lm.server --model {TARGET} --draft-model {DRAFT} --num-draft-tokens {gamma}{sampling}"
    return [
        f"MLX-LM: `{mlx}`. At temperature > 0 a token is accepted when samples of both models agree: less often than by any rule here.",
        "LM Studio (0.3.10 or later): import both models as GGUF or MLX and give the draft's name as `draft_model` in the request.",
        "TabbyAPI: `draft_model: {draft_model_dir: ..., draft_model_name: ...}` in config.yml, both models in an ExLlama format.",
        f"Fireworks: upload both, then `firectl deployment create TARGET --draft-model DRAFT --draft-token-count {gamma}`.",
        "Ollama and LMDeploy have no option for an independent draft, TGI serves none (heads and n-grams only).",
        *_without_draft(facts),
    ]


def _without_draft(facts: EngineFacts) -> list[str]:
    """How prompt lookup alone is started, at the sizes and gamma that it was timed with."""
    one = facts.lookup
    if one is None or one.ngrams is None:
        return []
    longest, shortest = one.ngrams
    ngram = {
        "method": "ngram", "num_speculative_tokens": one.gamma, "prompt_lookup_max": longest, "prompt_lookup_min": shortest,
    }  # fmt: skip
    chained = "; before the draft it is chained by llama.cpp alone (and `understudy generate --drafter cascade`)"
    return [
        f"No draft at all, prompt lookup, {_timed(one)} here{chained if facts.together else ''}: vLLM `vllm serve {TARGET} "
        f"--speculative-config {_json_word(ngram)}{_vllm_sampling(facts)}`; llama.cpp, for -md and the two options behind it, `--spec-type "
        f"ngram-simple {_ngram_simple(one)}` (n-grams of one length); transformers, for assistant_model, `prompt_lookup_num_tokens="
        f"{one.gamma}, max_matching_ngram_size={longest}` (down to single tokens)."
    ]


def _vllm_sampling(facts: EngineFacts) -> str:
    if facts.sampling is None:
        return ""
    return f" --generation-config vllm --override-generation-config {_json_word(sampling_fields(facts))}"


def _ngram_simple(one: Rival) -> str:
    assert one.ngrams is not None
    return f"--spec-ngram-simple-size-n {one.ngrams[1]} --spec-ngram-simple-size-m {one.gamma}"


def _timed(one: Rival) -> str:
    ends = f" [{one.speed_up_ci[0]:.2f}, {one.speed_up_ci[1]:.2f}]" if one.speed_up_ci else ""
    return f"timed at {one.speed_up:.2f}x{ends} the target alone"


def _predicted(facts: EngineFacts, rule: str) -> str:
    tau = facts.taus.get(rule)
    return "nothing was predicted" if tau is None else f"replay predicts tau {tau:.2f}"


def _tokenizer(facts: EngineFacts) -> str:
    if facts.pre_tokenizer is None:
        return " and refuses a tokenizer that it has never seen"
    return f"; a tokenizer that it has never seen is told to it as `{facts.pre_tokenizer}`, whose rules are this one's"


def _block(facts: EngineFacts) -> str:
    return f" (with sampled drafts {_predicted(facts, 'block')})" if "block" in facts.taus and facts.sampled else ""


def _json_word(value: Any) -> str:
    """A value as one word of a shell; `"$DRAFT"` in it is left to the shell."""
    return shlex.quote(json.dumps(value, separators=(",", ":"))).replace(r"\"$DRAFT\"", "'\"$DRAFT\"'")


def _most_requests(facts: EngineFacts) -> str:
    """What to do where gamma cannot follow the load."""
    if facts.most_load is not None:
        return f"Drafting pays up to {facts.most_load} concurrent requests: cap a server with the draft there"
    pays = any(gamma for _, _, gamma in facts.gamma_by_load)
    return (
        "Drafting pays at every load: no cap is needed" if pays else "Drafting pays at no load: serve the target alone"
    )
