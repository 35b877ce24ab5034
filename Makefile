# archipel: `make demo` runs the main job, `make test` checks everything. Both set up .venv first; both can be run again.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The browser demo: what it is made of, and where the built page goes so that the server finds it in the package.
NODE_READY := web/node_modules/.package-lock.json web/demo/node_modules/.package-lock.json
WEB_PAGE := archipel/server/http/demo_page/index.html
WEB_MODEL := web/demo/public/model/digits.bundle
WEB_SOURCES := $(shell find web -type f -not -path '*/node_modules/*' -not -path '*/tests/*' -not -path '*/dist/*' -not -path '*/public/model/*')
MODEL_SOURCES := scripts/web_demo_bundle.py $(shell find archipel/{autodiff,bundle,converter,datasets,graph,models,strategies,training} -name '*.py')

DOCS_PAGE := archipel/server/http/docs_page

# Of single rooms only the browser's need its page, which takes minutes to build.
ROOMS ?=
BROWSER_ROOMS := $(if $(ROOMS),$(filter browser% web% tests/browser% tests/web%,$(ROOMS)),all)
NODE := $(if $(BROWSER_ROOMS),node-if-possible)
WEB := $(if $(BROWSER_ROOMS),web-if-possible)

# Where this is set, each of the tests' hundreds of processes compiles anew whatever it imports: seconds for PyTorch.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo quick test test-all set-up tools known-rooms mutants lint web docs npm dist release node-if-possible web-if-possible \
	postgres-if-possible compiler-if-possible clean

help:
	@echo "make demo      install into .venv and run the main job (writes report.html)"
	@echo "make quick     format, lint, types, and the tests of what changed, in 90 s (BASE=REVISION, BUDGET=SECONDS)"
	@echo "make test      lint, types, import rules and the test suite (ROOMS='server/storage autodiff': these only)"
	@echo "make test-all  the same with the long suites, and the mutations; to the end, whatever fails (ROOMS=...)"
	@echo "make mutants   change the product in one place at a time and see that the tests notice (ARGS='ROOM ... --only NAME')"
	@echo "make lint      lint, types and import rules only"
	@echo "make web       build the browser demo, which archipel serve shows at /demo/"
	@echo "make docs      build the documentation into build/site/, which archipel serve shows at /docs/ with --docs"
	@echo "make npm       pack the browser's library for npm, into build/npm/"
	@echo "make dist      build the Python packages that are released, into dist/ (FOLDER=...)"
	@echo "make release   the same with the npm package, bills of materials and SHA256SUMS"
	@echo "make clean     remove .venv and everything built"

demo: $(READY)
	@$(BIN)/archipel demo $(ARGS)

quick: $(READY)
	@$(BIN)/python scripts/quick.py $(if $(BASE),--base $(BASE)) $(if $(BUDGET),--budget $(BUDGET))

test: set-up $(WEB)
	@$(BIN)/python scripts/test_rooms.py --lint $(ROOMS)

# Hours, in which nobody looks: nothing that fails keeps the rest from running, and all of it is told at the end.
test-all: set-up $(WEB)
	@$(MAKE) --no-print-directory docs || true
	@linted=; tested=; \
		$(MAKE) --no-print-directory lint && linted=true; \
		$(BIN)/python scripts/test_rooms.py --all $(ROOMS) && tested=true; \
		[ "$$linted" = true ] || echo "lint FAILED: see make lint"; \
		[ "$$linted" = true ] && [ "$$tested" = true ]

# What the tests need. pip installs while the system's packages are installed, which takes one core each.
set-up:
	@$(MAKE) --silent --no-print-directory --jobs=2 $(READY) tools
	@$(MAKE) --silent --no-print-directory known-rooms

# One after the other: apt-get has a lock.
tools:
	@for tool in postgres-if-possible compiler-if-possible $(NODE); do $(MAKE) --silent --no-print-directory $$tool || exit 1; done

# Before minutes go by: a name that is no room ends it.
known-rooms: $(READY)
	@$(if $(ROOMS),$(BIN)/python scripts/test_rooms.py --list $(ROOMS) >/dev/null)

mutants: $(READY)
	@$(BIN)/python scripts/mutants.py $(ARGS)

lint: $(READY)
	@echo "== lint";         $(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	@echo "== types";        $(BIN)/mypy --no-error-summary && MYPYPATH=examples/activity $(BIN)/mypy --no-error-summary examples/activity/*.py && \
		MYPYPATH=examples/physics $(BIN)/mypy --no-error-summary examples/physics/run.py
	@echo "== import rules"; $(BIN)/lint-imports --no-cache >$(VENV)/.imports 2>&1 || { cat $(VENV)/.imports; exit 1; }

# The stamp holds until what decides the installation changes. Python compiles a module when it is first imported: most
# of the 17,000 that pip would compile never are. uv installs in half a minute what takes pip two and a half; PyTorch
# comes by pip, which may be set up to find a build for processors. Where there is no uv, pip installs all.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "archipel needs Python 3.11 or newer: make PYTHON=/path/to/python3"; exit 1; }
	@echo "== setting up $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@{ $(INSTALL) --no-deps uv torch \
			&& $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'; } \
		|| $(INSTALL) --editable '.[dev]' || { echo "installation failed: see above; then run make again"; exit 1; }
	@touch $(READY)

web: $(WEB_PAGE)
	@:

# A server sends the packed files; the folder build/site opens in a browser without any server.
docs: $(READY)
	@echo "== building the documentation"
	@DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet
	@rm -rf $(DOCS_PAGE) && cp -R build/site $(DOCS_PAGE)
	@find $(DOCS_PAGE) \( -name '*.js' -o -name '*.css' -o -name '*.json' -o -size +64k -name '*.html' ! -path '$(DOCS_PAGE)/index.html' \) -exec gzip --force --best --no-name {} +
	@echo "build/site/index.html"

npm: $(READY) web/node_modules/.package-lock.json
	@$(BIN)/python scripts/npm_package.py build/npm

FOLDER ?= dist
dist: $(READY) web docs
	@$(BIN)/python scripts/release/wheels.py $(FOLDER)

release: $(READY) web docs
	@$(BIN)/python scripts/release/release.py $(FOLDER)

# A machine without Node.js or Chromium is told their names and goes on without the browser's tests, except in CI.
node-if-possible:
	@if scripts/install_browser.sh; then $(MAKE) --no-print-directory $(NODE_READY); \
		elif [ "$$CI" = true ]; then exit 1; else echo "the tests of the browser's runtime are skipped"; fi

web-if-possible: $(READY)
	@if scripts/install_browser.sh 2>/dev/null; then $(MAKE) --no-print-directory web; else [ "$$CI" != true ]; fi

postgres-if-possible:
	@scripts/install_postgres.sh || { [ "$$CI" != true ] && echo "the server's tests on PostgreSQL are skipped"; }

compiler-if-possible:
	@scripts/install_compiler.sh || { [ "$$CI" != true ] && echo "the kernel pack's tests are skipped"; }

$(WEB_PAGE): $(NODE_READY) $(WEB_MODEL) $(WEB_SOURCES)
	@echo "== building the browser demo"
	@cd web && node_modules/.bin/tsc --project . && node_modules/.bin/vite build --logLevel error demo
	@find web/demo/dist \( -name '*.wasm' -o -name '*.js' -o -name '*.css' -o -name '*.bin' \) -exec gzip --force --best --no-name {} +
	@rm -rf $(@D) && cp -R web/demo/dist $(@D) && touch $@

$(WEB_MODEL): $(READY) $(MODEL_SOURCES)
	@echo "== training the browser demo's model"
	@$(BIN)/python scripts/web_demo_bundle.py $(@D)

%/node_modules/.package-lock.json: %/package-lock.json
	@echo "== setting up $*/node_modules"
	@cd $* && npm ci --silent --ignore-scripts --no-audit --no-fund && touch node_modules/.package-lock.json

clean:
	rm -rf $(VENV) web/node_modules web/demo/node_modules web/dist web/demo/dist $(dir $(WEB_MODEL)) $(dir $(WEB_PAGE)) $(DOCS_PAGE) .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage*
