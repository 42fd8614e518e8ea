# `make` alone explains itself.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
.DEFAULT_GOAL := help
.PHONY: help setup demo loop smollm2 target check test explore engines peers prove bench docs clean

help:            ## what there is
	@grep -hE '^[a-z0-9]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(VENV)/ready  ## make the virtual environment and install everything, the tested versions

$(VENV)/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	touch $@

demo: setup      ## distil, judge and export a draft for the embedded target (7 to 10 minutes on 2 cores)
	$(BIN)/understudy demo

loop: setup      ## the closed loop: traffic shifts, the draft is retrained and takes over (6 minutes on 2 cores; after `make engines` in vLLM, 14)
	$(BIN)/python bench/closed_loop.py

smollm2: setup   ## a draft for a real instruct model, SmolLM2-135M in 4 bits: fetch, train, judge, export; in llama.cpp after `make engines` (docs/smollm2.md)
	$(BIN)/python bench/smollm2.py --out bench/results/smollm2_cpu.json

target: setup    ## train the embedded target again, from the standard library's source (an hour or more on 2 cores)
	$(BIN)/python bench/train_target.py --judge-every 250 --to runs/target-16 --run runs/target
	$(BIN)/python bench/train_target.py --start runs/target-16 --layers 32 --steps 400 --judge-every 200 --served-heads 64 --run runs/target-32

check: setup     ## lint, format, types; where an index answers, licences and known vulnerabilities of dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/house/audit.py

# Three runs: tests on all workers; beside them, one by one, those on the pretend CUDA device, which has to be there before torch, and
# those that start ranks. Each runs whatever the others said. Python may keep what it compiles: pytest's rewriting
# of the tests takes each process ten seconds.
# The seconds of each test stay in build/tests; the slowest are printed.
TIMES := --durations=15 --durations-min=1 --junitxml=build/tests
test: setup      ## all tests (6 to 15 minutes on 2 cores; more cores: make test WORKERS=8)
	@unset PYTHONDONTWRITEBYTECODE; started=$$(date +%s); status=0; said=$$(mktemp); \
	{ beside=0; $(BIN)/python -m pytest -m device $(TIMES)/device.xml || beside=1; $(BIN)/python -m pytest -m ranks $(TIMES)/ranks.xml || beside=1; exit $$beside; } > $$said 2>&1 & \
	beside=$$!; trap 'kill $$beside 2> /dev/null; rm -f $$said' EXIT; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not device and not engine and not loop and not ranks and not real" $(TIMES)/main.xml || status=1; \
	wait $$beside || status=1; cat $$said; \
	seconds=$$(($$(date +%s) - started)); echo "make test took $$((seconds / 60)) min $$((seconds % 60)) s"; exit $$status

ENGINES := .venv-vllm .venv-openvino .venv-llamacpp .venv-transformers4
engines:         ## vLLM, OpenVINO GenAI, llama.cpp and transformers 4 for CPUs, each in a folder of its own, for `pytest -m engine` (x86-64; 4 GB, 20 minutes; llama.cpp wants cmake and a C++ compiler)
	@for part in $(ENGINES); do $(MAKE) $$part/ready || echo "$$part is left out: it cannot be built here (why is said above)"; done

.venv-vllm/ready: tests/engines/vllm.txt tests/engines/vllm_cpu/pyproject.toml tests/engines/vllm_cpu/vllm_cpu_sampling.py
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install -q -c tests/engines/vllm.txt torch
	.venv-vllm/bin/pip install -q --no-deps -r tests/engines/vllm.txt ./tests/engines/vllm_cpu
	touch $@

.venv-openvino/ready: tests/engines/openvino.txt
	test -x .venv-openvino/bin/python || $(PYTHON) -m venv .venv-openvino
	.venv-openvino/bin/pip install -q -c $< torch
	.venv-openvino/bin/pip install -q --no-deps -r $<
	touch $@

.venv-transformers4/ready: tests/engines/transformers4.txt
	test -x .venv-transformers4/bin/python || $(PYTHON) -m venv .venv-transformers4
	.venv-transformers4/bin/pip install -q -c $< torch
	.venv-transformers4/bin/pip install -q --no-deps -r $<
	touch $@

# llama.cpp's server and quantiser, for this machine's own processor, without the server's page. Its converter runs in our environment.
LLAMACPP := .venv-llamacpp/source
JOBS ?= 2
.venv-llamacpp/ready: tests/engines/llamacpp.txt
	rm -rf .venv-llamacpp && mkdir -p $(LLAMACPP) .venv-llamacpp/bin
	$(PYTHON) -m pip download -q --no-deps --no-binary llama-cpp-python -d $(LLAMACPP) -r $<
	tar -xzf $(LLAMACPP)/llama_cpp_python-*.tar.gz -C $(LLAMACPP) --strip-components=1
	cmake -S $(LLAMACPP)/vendor/llama.cpp -B $(LLAMACPP)/built -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
		-DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
	cmake --build $(LLAMACPP)/built --target llama-server llama-quantize -j $(JOBS)
	cp $(LLAMACPP)/built/bin/llama-server $(LLAMACPP)/built/bin/llama-quantize .venv-llamacpp/bin/
	rm -rf $(LLAMACPP)/built $(LLAMACPP)/*.tar.gz
	touch $@

peers: setup .venv-openvino/ready .venv-llamacpp/ready  ## OpenVINO GenAI and llama.cpp for bench/peers.py (3 GB, 15 minutes; wants cmake and a C++ compiler)

explore: setup   ## the property tests with examples that no run had before; for the night
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not device and not engine and not loop and not ranks and not real" --hypothesis-profile explore

prove: setup     ## the statistical claims with simulations of full size (make test runs them small)
	UNDERSTUDY_PROVE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --timeout 7200 -o faulthandler_timeout=0 -m simulation

bench: setup     ## the numbers in README and docs; writes bench/results/
	$(BIN)/python bench/decode.py --out bench/results/decode.json
	$(BIN)/python bench/replay.py --out bench/results/replay.json
	$(BIN)/python bench/gateway.py --out bench/results/gateway.json
	$(BIN)/pip install -q -c constraints.txt -e ".[bench]"
	$(BIN)/python bench/train_step.py --out bench/results/train_step.json

docs: setup      ## the pages of docs/ as a site in build/site; fails on a broken link
	$(BIN)/mkdocs build --strict -f configs/mkdocs.yml

clean:           ## remove runs and caches; keeps the virtual environment
	rm -rf runs build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
