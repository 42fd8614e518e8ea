"""The target behind a server: responses and top-k signals from an OpenAI-compatible endpoint, resumable, into our stores.

The protocol is `/v1/completions` as vLLM serves it, with its extra parameters: prompts are token ids, `return_token_ids` brings
the response's ids back, `prompt_logprobs` the most probable tokens at every place of a given text. SGLang answers prompts the
same way but has no `prompt_logprobs`. Legend: R response tokens, K entries of a row.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from data.responses.endpoint_keys import Endpoint
from data.responses.engine_http import engine_http, within
from data.responses.prompt_logprobs import read_topk
from data.responses.rendered import RenderedPrompt
from data.responses.respond import ResponseBar, ResponsePlan, row_of
from data.responses.served import TEXTS, TOP, recognise
from data.responses.store import Row, Store
from data.signals.signal import TopKSignal
from data.signals.store import SignalStore
from speculative.decoder.responses import DecodeSettings, Response
from speculative.errors import UserError
from speculative.rules.sampling import SamplingSettings

_ENTRY_BYTES = 200  # of `prompt_logprobs`, at most: an id, its log-probability, rank and text
_RETRY_SECONDS = 60.0  # that openai waits at most before it asks again
_PROBE_TEXT = 'def f(x):\n    return "na\u00efve \u6771\u4eac" + str(12345)  # ok'


Choice = Mapping[str, Any]  # one of an answer's, as its server wrote it


class EndpointTarget:
    """A target whose weights are elsewhere. Safe to use from threads; nothing is asked before the first call."""

    most_bytes = 1 << 28  # of one answer
    no_completion = "the answer is no completion ({said}); target.endpoint.url must be that of an OpenAI-compatible server, with /v1 at its end"

    def __init__(self, endpoint: Endpoint, tokenizer: Any, vocab_rows: int, record: Path | None = None) -> None:
        """``tokenizer``: the target's, to read responses of servers that give text only; ``vocab_rows``: rows of its head.

        ``record``: file that says which model answered before; see `data.responses.served`.
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
                api_key="EMPTY",  # Without one it takes another from the environment. The HTTP client sends the right one.
                timeout=self.endpoint.timeout,
                max_retries=self.endpoint.retries,
                http_client=engine_http(self.endpoint.url, self.key, most_bytes=self.most_bytes),
            )
        return self._client

    @property
    def key(self) -> str:
        """What the server wants to be told; empty: nothing."""
        return os.environ.get(self.endpoint.api_key_env, "")

    @property
    def model(self) -> str:
        """The model's name at the server, once it is known to be served.

        Raises:
            UserError: no server there, key refused, another model than asked, several to choose from.
        """
        if self._model is None:
            listed = self._ask(lambda: {str(model.id): model for model in self.client.models.list()})
            url, wanted, names = self.endpoint.url, self.endpoint.model, ", ".join(listed) or "no model"
            if wanted is None and len(listed) != 1:
                raise UserError(f"target.endpoint.model (--model): {url} serves {names}; name one of them")
            if wanted is not None and wanted not in listed:
                raise UserError(f"target.endpoint.model (--model) = {wanted}: {url} serves {names}")
            self._model = wanted or next(iter(listed))
            # vLLM's own: the directory or hub id that the name stands for.
            self._root = getattr(listed[self._model], "root", None)
        return self._model

    def check(self) -> None:
        """Asks who is there, and whether its tokenizer splits a text as ours does (where the server shows its prompt's ids).

        Raises:
            UserError: as `model`; another tokenizer; another model than the record's.
        """
        choice = self._complete(
            _PROBE_TEXT, max_tokens=1, temperature=0.0, add_special_tokens=False, return_token_ids=True
        )
        theirs = choice.get("prompt_token_ids")
        ours = list(self.tokenizer(_PROBE_TEXT, add_special_tokens=False)["input_ids"])
        if theirs is not None and list(theirs) != ours:
            raise UserError(
                f"{self.endpoint.url}: {self.model} splits text into other tokens than target.path's tokenizer does "
                f"({theirs[:6]}... against {ours[:6]}...); give the served model's own directory or hub id as target.path"
            )
        self._recognise()

    def _recognise(self) -> None:
        """Refuses another model than the one that answered before."""
        if self.record is not None:
            says = [self._next_token(text) for text in TEXTS]
            recognise(self.record, {"model": self.model, "root": self._root, "next": says}, self.endpoint.url)

    def _next_token(self, text: str) -> dict[str, float]:
        """Log-probabilities of the most likely tokens behind a text; none from a server that does not say."""
        # At temperature 1 a server that gives processed probabilities gives the same.
        choice = self._complete(text, max_tokens=1, temperature=1.0, logprobs=TOP)
        return ((choice.get("logprobs") or {}).get("top_logprobs") or [{}])[0]

    def respond(self, store: Store, plan: ResponsePlan, settings: DecodeSettings, show: bool = True) -> None:
        """As `data.responses.respond.respond`.

        Every request carries a seed made from (settings.seed, prompt id, sample number), so what is made again after a kill is
        the same as far as the server keeps to seeds.

        Raises:
            UserError: the server cannot be asked, or cannot answer at these settings. Whole shards stay.
        """
        lacking, total = plan.share(store)
        if not lacking:
            return
        self.check()
        self._check_probabilities(settings.sampling, plan.prompts)
        answers: dict[int, dict[int, Row]] = {shard: {} for shard, _ in lacking}
        wanted = {shard: len(numbers) for shard, numbers in lacking}

        def work(job: tuple[int, int]) -> Row:
            prompt, sample = plan.job(job[1])
            return row_of(prompt, sample, self._answer(prompt, settings, f"{prompt.prompt_id}:{sample}"))

        label, done = f"{store.folder.name} responses", total - sum(wanted.values())
        with ResponseBar(label, total, done, show and plan.rank == 0) as progress:
            for (shard, number), row in self.each(work, ((shard, job) for shard, jobs in lacking for job in jobs)):
                progress.count(len(row.log_target_probs))
                answers[shard][number] = row
                if len(answers[shard]) == wanted[shard]:
                    rows = answers.pop(shard)
                    ordered = [rows[number] for number in sorted(rows)]
                    self._before_shard(store, ordered)
                    store.write_shard(shard, ordered)
                    progress.store(len(rows))

    def topk(
        self, store: SignalStore, rows: Sequence[Row], k: int, *, rank: int = 0, ranks: int = 1, show: bool = True
    ) -> None:
        """Writes the signal that an opened store lacks: example i is row i; this rank every `ranks`-th.

        Raises:
            UserError: the server cannot be asked, or does not give `prompt_logprobs`, or not so many. What was written stays.
        """
        missing = [index for index in store.missing() if index % ranks == rank]
        if not missing:
            return
        longest = max(len(rows[index].prompt_ids) + len(rows[index].response_ids) for index in missing)
        if (needed := longest * (k + 2) * _ENTRY_BYTES) > self.most_bytes:
            self.most_bytes, self._client = needed, None
        self.check()
        mine = len(range(rank, len(rows), ranks))

        def work(index: int) -> TopKSignal:
            return self.score(rows[index].prompt_ids, rows[index].response_ids, k)

        with ResponseBar("teacher signal", mine, mine - len(missing), show and rank == 0) as progress:
            for index, signal in self.each(work, missing):
                store.write({index: signal})
                progress.count(len(signal.log_tail_R))
                progress.store(1)

    def _answer(self, prompt: RenderedPrompt, settings: DecodeSettings, key: str) -> Response:
        return self.answer(prompt.prompt_ids, settings, key)

    def _before_shard(self, store: Store, rows: Sequence[Row]) -> None:
        """Before responses are written."""

    def answer(self, prompt_ids: Sequence[int], settings: DecodeSettings, key: str) -> Response:
        """One response to a prompt, sampled by the server with a seed made from the settings' seed and ``key``.

        Raises:
            UserError: the server cannot be asked; its answer cannot be read as tokens.
        """
        options = request_of(settings, key)
        choice = self._complete(list(prompt_ids), **options, logprobs=1, return_tokens_as_token_ids=True)
        finished = choice.get("finish_reason") == "stop"
        ids = self._ended(self._ids_of(choice), choice, settings.eos_ids)
        answer = Response(key, list(prompt_ids), response_ids=ids, finish_reason="end" if finished else "length")
        if settings.sampling.greedy:
            answer.log_target_probs = [0.0] * len(ids)
            return answer
        log_probs = [float(value) for value in (choice.get("logprobs") or {}).get("token_logprobs") or []]
        if len(log_probs) != len(ids):
            raise UserError(
                f"{self.endpoint.url}: {len(log_probs)} log-probabilities for {len(ids)} response tokens; the server must give "
                "one for each, the end token included (vLLM does)"
            )
        answer.log_target_probs = log_probs
        return answer

    def score(self, prompt_ids: Sequence[int], response_ids: Sequence[int], k: int) -> TopKSignal:
        """The K most probable tokens at each response token, and the rest's mass, at temperature 1.

        Raises:
            UserError: the server cannot be asked, or does not give `prompt_logprobs`, or not so many; another vocabulary.
        """
        ids = [*prompt_ids, *response_ids]
        content = self._content(ids, max_tokens=1, temperature=0.0, prompt_logprobs=k)
        try:
            found = read_topk(content, len(prompt_ids), len(ids), k, self.vocab_rows)
        except ValueError as error:
            raise UserError(f"{self.endpoint.url}: {error}") from error
        return TopKSignal(*map(torch.from_numpy, found))

    def _ended(self, ids: list[int], choice: Choice, eos_ids: Sequence[int]) -> list[int]:
        """A response's ids, the end token behind them where it ended by itself and they leave it out.

        Raises:
            UserError: it is not said which of several end tokens; a token of another vocabulary.
        """
        if choice.get("finish_reason") == "stop" and (not ids or ids[-1] not in eos_ids):
            said = choice.get("stop_reason", choice.get("matched_stop"))
            if said not in eos_ids and len(eos_ids) != 1:
                raise UserError(
                    f"{self.endpoint.url}: does not say which of the end tokens {list(eos_ids)} ended a response; use vLLM"
                )
            ids = [*ids, said if isinstance(said, int) and said in eos_ids else eos_ids[0]]
        if foreign := [token for token in ids if not 0 <= token < self.vocab_rows]:
            raise UserError(
                f"{self.endpoint.url}: {self.model} said token {foreign[0]}, but target.path's vocabulary has {self.vocab_rows} rows; "
                "target.path must be the model that is served"
            )
        return ids

    def _ids_of(self, choice: Choice) -> list[int]:
        """Token ids of a response: given as such, in the names of its tokens, or from its text when that is beyond doubt."""
        if choice.get("token_ids") is not None:
            return [int(token) for token in choice["token_ids"]]
        names = (choice.get("logprobs") or {}).get("tokens") or []
        if names and all(str(name).startswith("token_id:") for name in names):
            return [int(str(name).removeprefix("token_id:")) for name in names]
        ids = [int(token) for token in self.tokenizer(choice.get("text") or "", add_special_tokens=False)["input_ids"]]
        # The same text may be several token sequences: the pieces must be those that the server names.
        pieces = [self.tokenizer.decode([token]) for token in ids]
        if pieces != list(names)[: len(ids)] or len(names) - len(ids) not in (0, 1):
            raise UserError(
                f"{self.endpoint.url}: gives no token ids, and its text does not split into the {len(names)} tokens it names; "
                "use a server that knows return_token_ids (vLLM 0.10.2 or later)"
            )
        return ids

    def _check_probabilities(self, sampling: SamplingSettings, prompts: Sequence[RenderedPrompt]) -> None:
        """Refuses a server that gives the model's raw probabilities where the settings make others of them.

        With top_k 1 a sampled token has probability one under the settings; the raw one is less.
        """
        if sampling.greedy or sampling == SamplingSettings():
            return
        for prompt in prompts[:4]:
            choice = self._complete(
                list(prompt.prompt_ids), max_tokens=8, temperature=1.0, top_k=1, logprobs=1, return_token_ids=True
            )
            values = (choice.get("logprobs") or {}).get("token_logprobs") or []
            if any(float(value) < -1e-3 for value in values):
                raise UserError(
                    f"{self.endpoint.url}: gives probabilities before temperature, top-k and top-p; start the server with "
                    "--logprobs-mode processed_logprobs, or serve at temperature 1 without top_k, top_p and min_p"
                )

    def _complete(self, prompt: str | list[int], **options: Any) -> Choice:
        """The first choice of a completion; OpenAI's parameters and the servers' own in one."""
        content = self._content(prompt, **options)
        return self._ask(lambda: dict(json.loads(content)["choices"][0]))

    def _content(self, prompt: str | list[int], **options: Any) -> bytes:
        """The JSON of a completion."""
        raw, model = self.client.completions.with_raw_response, self.model
        # In the extra body: elsewhere the client looks at each id of a prompt by itself, 20 us a piece.
        body = {**options, "prompt": prompt}
        return self._ask(
            lambda: raw.create(model=model, prompt="", extra_body=body).http_response.content,
            options.get("prompt_logprobs"),
        )

    def _ask(self, call: Callable[[], Any], k: int | None = None) -> Any:
        import openai

        endpoint = self.endpoint
        seconds = endpoint.timeout * (endpoint.retries + 1) + _RETRY_SECONDS * endpoint.retries + 1.0
        try:
            with within(seconds, endpoint.url, self.client.close):
                return call()
        except openai.OpenAIError as error:
            raise UserError(self._refusal(error, k)) from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, UserError):
                raise
            said = f"{type(error).__name__}: {str(error)[:80]}"
            raise UserError(f"{self.endpoint.url}: {self.no_completion.format(said=said)}") from error

    def _refusal(self, error: Any, k: int | None) -> str:
        """What a person does about a fault of the client."""
        import openai

        endpoint = self.endpoint
        url, said = endpoint.url, " ".join(str(getattr(error, "message", error)).split())[:200]
        stays = "what is stored stays; the same command goes on"
        if isinstance(error, openai.APITimeoutError):
            return (
                f"{url}: no answer within {endpoint.timeout:g} s, asked {endpoint.retries + 1} times; raise target.endpoint.timeout or "
                f"lower target.endpoint.concurrency; {stays}"
            )
        if isinstance(error, openai.APIConnectionError):
            cause = str(error.__cause__ or "").split("\n")[0] or said
            return f"target.endpoint.url = {url}: no server answers ({cause}); start it (`vllm serve MODEL`); {stays}"
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            named = endpoint.api_key_env or "that target.endpoint.api_key_env (--api-key-env) gives the name of"
            return f"{url}: refuses the key; put the right one into the environment variable {named}"
        if isinstance(error, openai.NotFoundError):
            return f"{url}: {said or 'not found'}; target.endpoint.url must end in /v1, and {self._model or 'a model'} must be served there"
        limit = re.search(r"logprobs.*(?:max allowed|maximum)\D*(\d+)", said)
        if k is not None and limit:
            return f"{url}: gives at most {limit.group(1)} {'prompt_logprobs' if 'prompt' in said else 'top_logprobs'}; start it with --max-logprobs {k}, or lower signal.k"
        if isinstance(error, openai.BadRequestError) and re.search(
            r"context length|max_model_len|maximum model length", said
        ):
            return f"{url}: a text is too long for it ({said}); set data.context_length below the server's limit"
        status = getattr(error, "status_code", None)
        return f"{url}: {status or type(error).__name__}: {said}; {stays}"

    def each(self, work: Callable[[Any], Any], jobs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """(job, result) as they come, `concurrency` at a time; after a fault or Ctrl-C no further request is made."""
        waiting, under_way = iter(jobs), dict[Future[Any], Any]()
        pool = ThreadPoolExecutor(self.endpoint.concurrency, thread_name_prefix="endpoint")
        try:
            while True:
                while len(under_way) < 2 * self.endpoint.concurrency and (job := next(waiting, None)) is not None:
                    under_way[pool.submit(work, job)] = job
                if not under_way:
                    break
                finished, _ = wait(under_way, return_when=FIRST_COMPLETED)
                # The good ones first: what one request did wrong must not lose what others brought.
                for future in sorted(finished, key=lambda future: future.exception() is not None):
                    job = under_way.pop(future)
                    yield job, future.result()
        finally:
            for future in under_way:
                future.cancel()
            if under_way and self._client is not None:
                self._client.close()  # else the interpreter would wait for requests that nobody needs
                self._client = None
            pool.shutdown(wait=not under_way, cancel_futures=True)


def request_of(settings: DecodeSettings, key: str) -> dict[str, object]:
    """What a request says of how to sample, with a seed made from the settings' and ``key``, and that token ids are wanted."""
    sampling = settings.sampling
    return {
        "max_tokens": settings.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": request_seed(settings.seed, key),
        # The defaults of the model's own generation_config.json would hold for whatever is left out.
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


def request_seed(seed: int, key: str) -> int:
    """31 bits of SHA-256 over both."""
    return int.from_bytes(hashlib.sha256(f"{seed}\x00{key}".encode()).digest()[:4], "big") >> 1
