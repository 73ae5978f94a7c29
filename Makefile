# `make help` lists the targets. Each sets up what it needs: python3, make and a network are enough.

PYTHON  ?= python3
VENV    ?= .venv
TORCH   ?= torch==2.13.0
WORKERS ?= 2
ARGS    ?=

bin := $(VENV)/bin
# Named after what was asked for, so that another TORCH is another installation.
installed := $(VENV)/.installed-$(shell printf '%s' '$(TORCH)' | cksum | cut -d ' ' -f 1)

.DEFAULT_GOAL := help
.PHONY: help compare bench test test-gpu lint format clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12
	@echo 'variables: TORCH ($(TORCH)), VENV ($(VENV)), PYTHON ($(PYTHON)), WORKERS ($(WORKERS)), ARGS'

compare: $(installed) ## FA1, FA2, FA3 side by side: measured on a Hopper GPU, compiled and counted without one
	$(bin)/python -m benchmarks compare $(ARGS)

bench: $(installed) ## any benchmark command, e.g. make bench ARGS='doctor'; none lists them
	$(bin)/python -m benchmarks $(or $(ARGS),--help)

test: $(installed) ## all that needs no GPU
	$(bin)/python -m pytest -m 'not gpu' -n $(WORKERS) $(ARGS)

test-gpu: $(installed) ## all that needs a Hopper GPU
	$(bin)/python -m pytest -m gpu -rs $(ARGS)

lint: $(installed) ## style and formatting, by ruff
	$(bin)/ruff check .
	$(bin)/ruff format --check .

format: $(installed) ## let ruff fix what it can
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

clean: ## remove caches, not the environment
	rm -rf .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(installed): pyproject.toml
	@echo 'setting up $(VENV) with $(TORCH): a few minutes the first time'
	@test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	@$(bin)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' -e '.[bench,dev]'
	@touch $@
