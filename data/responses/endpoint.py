"""A target at an OpenAI-compatible server: its responses, and its most probable tokens at each place of a text.

The protocol is `/v1/completions` with the extra parameters of `SERVER`. Prompts are token ids, `return_token_ids` returns the ids of the
response, and `prompt_logprobs` the most probable tokens at every place of a text. Some servers have
no `prompt_logprobs`. Legend: R response tokens, K entries of a row.
"""

import functools
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from data.responses.dealing import Dealing, Lane
from data.responses.endpoint_keys import SERVER, Endpoint
from data.responses.engine_http import engine_http, within
from data.responses.prompt_logprobs import read_topk
from data.responses.rendered import RenderedPrompt
from data.responses.server_identity import TEXTS, TOP, ServerIdentity, WrongServer, recognise
from data.signals.signal import TopKSignal
from speculative.decoder.responses import DecodeSettings, Response
from speculative.errors import UserError
from speculative.progress import note
from speculative.rules.sampling import SamplingSettings

ROUNDING = 1e-3  # of a log-probability of 0
_RETRY_SECONDS = 60.0  # The longest time that openai waits before a retry.
PROBE_TEXT = 'def f(x):\n    return "na\u00efve \u6771\u4eac" + str(12345)  # ok'


Choice = Mapping[str, Any]  # One choice of an answer, as the server wrote it.


class EndpointTarget:
    """A target at a server. Safe to use from threads; no request is made before the first call."""

    most_bytes = 1 << 28  # Size limit of one answer.
    retries = 5  # of a request after a dropped connection, 429 or 5xx
    label = "target.path"  # The target's name in errors.
    no_completion = (
        "the answer is not a completion ({said}); target.endpoint.urls must be those of OpenAI-compatible "
        "servers and end in /v1"
    )

    def __init__(self, endpoint: Endpoint, tokenizer: Any, vocab_rows: int, record: Path | None = None) -> None:
        """``tokenizer``: the target's; ``vocab_rows``: rows of its head.

        ``record``: file that records which model answered before; see `data.responses.server_identity`.
        """
        self.endpoint, self.tokenizer, self.vocab_rows, self.record = endpoint, tokenizer, vocab_rows, record
        self._client: Any = None
        self._model: str | None = None
        self._root: str | None = None

    @property
    def client(self) -> Any:
        """The openai client."""
        if self._client is None:
            import openai

            self._client = openai.OpenAI(
                base_url=self.endpoint.url,
                api_key="EMPTY",  # Without it, openai would take a key from the environment. The HTTP client sends the right one.
                timeout=self.endpoint.timeout,
                max_retries=self.retries,
                http_client=engine_http(self.endpoint.url, self.key, most_bytes=self.most_bytes),
            )
        return self._client

    @property
    def key(self) -> str:
        """The API key of the server; empty: none."""
        return os.environ.get(self.endpoint.api_key_env, "")

    @property
    def model(self) -> str:
        """The name of the model at the server, checked once.

        Raises UserError: no server there, API key refused, the model is not served, or several models and no name is given.
        """
        if self._model is None:
            listed = self._ask(lambda: {str(model.id): model for model in self.client.models.list()})
            url, wanted, names = self.endpoint.url, self.endpoint.model, ", ".join(listed) or "no model"
            if wanted is None and len(listed) != 1:
                raise WrongServer(
                    f"{url} serves {names}; set one of them in target.endpoint.model (a command takes a server with one name)"
                )
            if wanted is not None and wanted not in listed:
                raise WrongServer(f"target.endpoint.model = {wanted}: {url} serves {names}")
            self._model = wanted or next(iter(listed))
            # Not of every server: the directory or hub id behind the name.
            self._root = getattr(listed[self._model], "root", None)
        return self._model

    def check(self) -> None:
        """Check which model answers, and that its tokenizer splits a text like ours, if the server returns prompt ids.

        Raises UserError: as `model`; another tokenizer; another model than the recorded one.
        """
        self._model = None  # Another one may be served now.
        choice = self._complete(
            PROBE_TEXT, max_tokens=1, temperature=0.0, add_special_tokens=False, return_token_ids=True
        )
        theirs = choice.get("prompt_token_ids")
        ours = list(self.tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"])
        if theirs is not None and list(theirs) != ours:
            raise WrongServer(
                f"{self.endpoint.url}: {self.model} splits text into other tokens than the tokenizer of {self.label} "
                f"({theirs[:6]}... and {ours[:6]}...); set {self.label} to the directory or hub id of the served model"
            )
        if self.record is not None:
            says = [self.next_token(text) for text in TEXTS]
            recognise(self.record, ServerIdentity(model=self.model, root=self._root, next=says), self.endpoint.url)

    def next_token(self, text: str | list[int]) -> dict[str, float]:
        """Log-probabilities of the most probable tokens after a text; empty if the server does not return them.

        They are by the words of tokens, or if the text is ids by `token_id:N`.
        """
        # At temperature 1 and with nothing cut, processed and raw probabilities are equal.
        neutral = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        as_ids = {} if isinstance(text, str) else {"return_tokens_as_token_ids": True}
        choice = self._complete(text, max_tokens=1, logprobs=TOP, **neutral, **as_ids)

        def listed() -> dict[str, float]:
            pairs = ((choice.get("logprobs") or {}).get("top_logprobs") or [{}])[0].items()
            # vLLM also lists the sampled token, however improbable it is; what is not listed would count as still less probable.
            return dict(sorted(pairs, key=lambda pair: -pair[1])[:TOP])

        return dict(self._ask(listed))

    def compare_chat(self) -> None:
        """Warn if the server makes other tokens of a chat than the tokenizer's chat template, where it has a chat API that says so."""
        if not self.tokenizer.chat_template:
            return
        chat: Any = [{"role": "user", "content": PROBE_TEXT}]
        ours = list(self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        raw, body = self.client.chat.completions.with_raw_response, {"return_token_ids": True}
        try:
            content = raw.create(model=self.model, messages=chat, max_tokens=1, extra_body=body).http_response.content
            theirs = list(json.loads(content)["prompt_token_ids"])
        except Exception:  # Whatever is wrong with its chat API: prompts are sent as ids.
            return
        if theirs != ours:
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(theirs, ours, strict=False)))
            note(
                f"warning: {self.endpoint.url}: its chat template makes {len(theirs)} tokens of a chat and that of {self.label} "
                f"{len(ours)}, of which the first {same} are equal; answers are not affected, but chats that it serves are"
            )

    def allow(self, size: int) -> None:
        """Accept answers of so many bytes."""
        if size > self.most_bytes:
            self.most_bytes, self._client = size, None

    def answer(self, prompt_ids: Sequence[int], settings: DecodeSettings, key: str) -> Response:
        """One response to a prompt, sampled by the server with a seed made from the settings' seed and ``key``.

        Raises UserError: the server does not answer, or its answer cannot be read as tokens.
        """
        options = request_of(settings, key)
        choice = self._complete(list(prompt_ids), **options, logprobs=1, return_tokens_as_token_ids=True)
        return response_of(choice, prompt_ids, settings, key, self.vocab_rows, self.endpoint.url, self.label)

    def score(self, prompt_ids: Sequence[int], response_ids: Sequence[int], k: int) -> TopKSignal:
        """The K most probable tokens at each response token and the total of the rest, at temperature 1.

        Raises UserError: the server does not answer, returns no or too few `prompt_logprobs`, or has another vocabulary.
        """
        ids = [*prompt_ids, *response_ids]
        content = self._response(ids, max_tokens=1, temperature=0.0, prompt_logprobs=k).content
        try:
            found = read_topk(content, len(prompt_ids), len(ids), k, self.vocab_rows)
        except ValueError as error:
            raise UserError(f"{self.endpoint.url}: {error}") from error
        return TopKSignal(*map(torch.from_numpy, found))

    def check_probabilities(self, sampling: SamplingSettings, prompts: Sequence[RenderedPrompt]) -> None:
        """Refuse a server that returns raw probabilities if the sampling settings change them.

        With top_k 1 a sampled token has probability one under the settings; its raw probability is lower.
        """
        if sampling.greedy or sampling == SamplingSettings():
            return
        for prompt in prompts[:4]:
            choice = self._complete(
                list(prompt.prompt_ids), max_tokens=8, temperature=1.0, top_k=1, logprobs=1, return_token_ids=True
            )
            if any(value < -ROUNDING for value in self._ask(functools.partial(_log_probs_of, choice))):
                raise WrongServer(
                    f"{self.endpoint.url}: returns probabilities before temperature, top-k and top-p; start the server with "
                    "--logprobs-mode processed_logprobs, or set serving.temperature: 1 without top_k, top_p and min_p"
                )

    def _complete(self, prompt: str | list[int], **options: Any) -> Choice:
        """The first choice of a completion; ``options`` are parameters of OpenAI or of the server."""
        content = self._response(prompt, **options).content
        return self._ask(lambda: dict(json.loads(content)["choices"][0]))

    def _response(self, prompt: str | list[int], headers: dict[str, str] | None = None, **options: Any) -> Any:
        """The HTTP response to a completion request with these options and headers."""
        raw, model = self.client.completions.with_raw_response, self.model
        # In the extra body, because elsewhere the client checks each id of a prompt, at 20 us each.
        body = {**options, "prompt": prompt}
        return self._ask(
            lambda: raw.create(model=model, prompt="", extra_body=body, extra_headers=headers).http_response,
            options.get("prompt_logprobs"),
        )

    def _ask(self, call: Callable[[], Any], k: int | None = None) -> Any:
        import openai

        endpoint = self.endpoint
        seconds = endpoint.timeout * (self.retries + 1) + _RETRY_SECONDS * self.retries + 1.0
        try:
            with within(seconds, endpoint.url, self.close):
                return call()
        except openai.OpenAIError as error:
            raise UserError(self._refusal(error, k)) from error
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            if isinstance(error, UserError):
                raise
            said = f"{type(error).__name__}: {str(error)[:80]}"
            raise UserError(f"{self.endpoint.url}: {self.no_completion.format(said=said)}") from error

    def _refusal(self, error: Any, k: int | None) -> str:
        """The message for an error of the client, with what the user can do."""
        import openai

        endpoint = self.endpoint
        url, message = endpoint.url, " ".join(str(getattr(error, "message", error)).split())[:200]
        stays = "finished work is kept; the same command continues"
        if isinstance(error, openai.APITimeoutError):
            return (
                f"{url}: no answer within {endpoint.timeout:g} s (attempts: {self.retries + 1}); raise target.endpoint.timeout or "
                f"lower target.endpoint.concurrency; {stays}"
            )
        if isinstance(error, openai.APIConnectionError):
            cause = str(error.__cause__ or "").split("\n")[0] or message
            return f"target.endpoint.urls: {url}: no server answers ({cause}); start {SERVER} there; {stays}"
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            named = endpoint.api_key_env or "that target.endpoint.api_key_env (--api-key-env) names"
            return f"{url}: refuses the API key; put the right one into the environment variable {named}"
        if isinstance(error, openai.NotFoundError):
            return (
                f"{url}: {message or 'not found'}; target.endpoint.urls must end in /v1, and "
                f"{self._model or 'a model'} must be served there"
            )
        limit = re.search(r"logprobs.*(?:max allowed|maximum)\D*(\d+)", message)
        if k is not None and limit:
            return (
                f"{url}: returns at most {limit.group(1)} "
                f"{'prompt_logprobs' if 'prompt' in message else 'top_logprobs'}; start it with --max-logprobs {k}, or lower signal.k"
            )
        too_long = re.search(r"context length|max_model_len|maximum model length", message)
        if isinstance(error, openai.BadRequestError) and too_long:
            return f"{url}: a text is too long for the server ({message}); set data.context_length below its limit"
        status = getattr(error, "status_code", None)
        return f"{url}: {status or type(error).__name__}: {message}; {stays}"

    def close(self) -> None:
        """End all requests; later ones get another client."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def each(self, work: Callable[[Any], Any], jobs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (job, result) as they finish, `concurrency` at a time. After an error or Ctrl-C no more requests are made."""
        return Dealing([Lane(self)], lambda _, job: work(job), lambda _: self.check(), jobs).results()


def response_of(
    choice: Choice,
    prompt_ids: Sequence[int],
    settings: DecodeSettings,
    key: str,
    vocab_rows: int,
    origin: str,
    label: str = EndpointTarget.label,
) -> Response:
    """The response in a choice of an answer. UserError, which begins with ``origin``: it is not whole, or cannot be read as tokens of this
    vocabulary with their log-probabilities.
    """
    try:
        finish = choice.get("finish_reason")
        ids = with_end(_ids_of(choice, origin), choice, settings.eos_ids, vocab_rows, origin, label)
        log_probs = [] if settings.sampling.greedy else _log_probs_of(choice)
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"{origin}: not a completion ({error})") from error
    if finish not in ("stop", "length") or not 0 < len(ids) <= settings.max_tokens:
        raise UserError(
            f"{origin}: not a whole answer: {len(ids)} tokens of at most {settings.max_tokens}, finish_reason {finish!r}"
        )
    answer = Response(key, list(prompt_ids), response_ids=ids, finish_reason="end" if finish == "stop" else "length")
    if settings.sampling.greedy:
        answer.log_target_probs = [0.0] * len(ids)
        return answer
    if not all(-math.inf < value <= ROUNDING for value in log_probs):
        raise UserError(
            f"{origin}: log-probabilities that are none: {[one for one in log_probs if not one <= 0.0][:4]}"
        )
    if len(log_probs) != len(ids):
        raise UserError(
            f"{origin}: {len(log_probs)} log-probabilities for {len(ids)} response tokens; the server must return one for each, "
            f"including the end token ({SERVER} does)"
        )
    answer.log_target_probs = log_probs
    return answer


def with_end(
    ids: list[int], choice: Choice, eos_ids: Sequence[int], vocab_rows: int, origin: str, label: str
) -> list[int]:
    """Ids of a response, with a left-out end token added; UserError if it is unknown which one, or for another vocabulary."""
    if choice.get("finish_reason") == "stop" and (not ids or ids[-1] not in eos_ids):
        end_token = choice.get("stop_reason", choice.get("matched_stop"))
        if end_token not in eos_ids and len(eos_ids) != 1:
            raise UserError(f"{origin}: does not say which of {list(eos_ids)} ended a text; use {SERVER}")
        ids = [*ids, end_token if isinstance(end_token, int) and end_token in eos_ids else eos_ids[0]]
    if foreign := [token for token in ids if not 0 <= token < vocab_rows]:
        raise UserError(
            f"{origin}: token {foreign[0]}, but the vocabulary of {label} has {vocab_rows} rows; {label} must be the served model"
        )
    return ids


def _ids_of(choice: Choice, origin: str) -> list[int]:
    """Token ids of a response: as returned, or from the names of its tokens."""
    if choice.get("token_ids") is not None:
        return [int(token) for token in choice["token_ids"]]
    names = (choice.get("logprobs") or {}).get("tokens") or []
    if (names or not choice.get("text")) and all(str(name).startswith("token_id:") for name in names):
        return [int(str(name).removeprefix("token_id:")) for name in names]
    raise UserError(f"{origin}: returns no token ids; use a server with return_token_ids ({SERVER})")


def _log_probs_of(choice: Choice) -> list[float]:
    return [float(value) for value in (choice.get("logprobs") or {}).get("token_logprobs") or []]


def request_of(settings: DecodeSettings, key: str) -> dict[str, object]:
    """Sampling options of a request, which also asks for token ids. The seed is made from the settings' seed and ``key``."""
    sampling, digest = settings.sampling, hashlib.sha256(f"{settings.seed}\x00{key}".encode()).digest()
    return {
        "max_tokens": settings.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": int.from_bytes(digest[:4], "big") >> 1,  # 31 bits
        # The server would take missing options from the model's generation_config.json.
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop_token_ids": list(settings.eos_ids),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "return_token_ids": True,
    }
