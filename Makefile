# The same commands on a desk and in CI. Everything lives in .venv; `make setup` is a no-op when nothing changed.
.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench proto licences clean

PYTHON_ENV := .venv/bin
KERNELS := .venv/.livebed-kernels
PROTOS := $(sort $(wildcard proto/*/*.proto))
# What may be among our dependencies: permissive licences and file-level copyleft (MPL). Never GPL, LGPL or AGPL.
LICENCES := Apache;BSD;MIT;ISC;MPL;Mozilla;PSF;Python Software Foundation;Unlicense;0BSD;BSL-1.0;CC0-1.0;Zlib

help: ## say what each target does
	@sed -n 's/^\([a-z]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: ## make .venv, install the pinned packages and the project, compile the kernels
	@sh requirements/install.sh .venv dev
	@$(MAKE) --no-print-directory $(KERNELS)

$(KERNELS): .venv/.livebed-setup $(wildcard trainer/*.py)
	@echo "livebed setup: compiling the numeric kernels (up to a minute the first time, cached on disk)"
	@$(PYTHON_ENV)/python -m trainer.warm
	@touch $@

demo: setup ## start everything, replay a real click log against it, then keep serving
	@$(PYTHON_ENV)/livebed demo

test: setup ## run all tests (unit, contract, system), two files at a time; those that measure time alone, afterwards
	@$(PYTHON_ENV)/python -m pytest -q -n 2 --dist loadfile -m "not alone"
	@$(PYTHON_ENV)/python -m pytest -q -m alone

check: setup ## linters, types, architecture, wire format and API unbroken, generated code, licences, advisories
	$(PYTHON_ENV)/ruff check .
	$(PYTHON_ENV)/ruff format --check .
	$(PYTHON_ENV)/mypy --strict trainer service
	$(PYTHON_ENV)/lint-imports --no-logo
	$(PYTHON_ENV)/buf lint proto
	$(PYTHON_ENV)/buf breaking proto --against tests/contract/baseline/proto.binpb
	$(PYTHON_ENV)/python -m tests.contract.openapi_diff
	@$(MAKE) --no-print-directory stubs OUT=.cache/stubs
	@for stub in $$(cd .cache/stubs && find . -name '*_pb2*'); do \
		cmp ".cache/stubs/$$stub" "$$stub" || { echo "the stubs are older than the .proto files: run make proto"; exit 1; }; \
	done
	@$(MAKE) --no-print-directory licences
	@$(PYTHON_ENV)/python requirements/audit.py

bench: setup ## run every benchmark and fill the README's table
	@$(PYTHON_ENV)/python -m tests.bench.report

proto: setup ## generate the protobuf and gRPC stubs again
	@$(MAKE) --no-print-directory stubs OUT=.
	@echo "generated from $(PROTOS)"

.PHONY: stubs
stubs:
	@mkdir -p $(OUT)
	@PATH="$(CURDIR)/$(PYTHON_ENV):$$PATH" $(PYTHON_ENV)/python -m grpc_tools.protoc -Iproto \
		--python_out=$(OUT) --mypy_out=quiet:$(OUT) $(PROTOS)
	@$(foreach file,$(wildcard proto/service/*.proto),PATH="$(CURDIR)/$(PYTHON_ENV):$$PATH" \
		$(PYTHON_ENV)/python -m grpc_tools.protoc -Iproto --grpc_python_out=$(OUT) --mypy_grpc_out=quiet:$(OUT) $(file) &&) true

licences: ## fail if a dependency has a licence that we do not allow
	@$(PYTHON_ENV)/pip-licenses --partial-match --allow-only "$(LICENCES)" --format=csv >/dev/null
	@echo "licences of all dependencies are allowed ones"

clean: ## remove the environment and everything generated (not the stubs, which are committed)
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
	find trainer service tests -name __pycache__ -type d -exec rm -rf {} +
