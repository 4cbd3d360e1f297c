# make demo | test | test-all | check | format | clean
# Every target first brings .venv up to date, and does nothing about it when it is. Another Python: make PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
PIP ?= $(VENV)/bin/python -m pip
INSTALLED := $(VENV)/.installed

.DELETE_ON_ERROR:
.PHONY: demo test test-all check format clean venv

demo: $(INSTALLED)
	$(VENV)/bin/planloom demo

# Tests of one process each in several at once; then, one by one, those that must be alone. Both always.
test: $(INSTALLED)
	$(VENV)/bin/pytest -n auto --maxprocesses 8 -m "not slow and not alone"; side=$$?; \
	  $(VENV)/bin/pytest -m "not slow and alone" && exit $$side

test-all: $(INSTALLED)
	$(VENV)/bin/pytest -n auto --maxprocesses 8 -m "not alone"; side=$$?; \
	  $(VENV)/bin/pytest -m "alone" && exit $$side

check: $(INSTALLED)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pytest -q tests/pure/test_house.py

format: $(INSTALLED)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

venv: $(INSTALLED)

# A .venv without a working pip is one whose making was interrupted. Debian's Python can lack ensurepip: then its own pip
# brings pip into the environment. torch comes first and alone, so that pip takes a CPU build wherever one is offered and
# never the CUDA packages of another. The stamp is written last: what was interrupted is done again.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Planloom needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 \
	  || $(PYTHON) -m venv --clear $(VENV) \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV)/bin/python install pip; }
	$(PIP) install torch -c constraints.txt
	$(PIP) install -e '.[models,dev]' -c constraints.txt
	@touch $@
