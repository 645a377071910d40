# What a newcomer needs. Everything lives in .venv; converted models are cached in ~/.cache/insitu.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1

CPU_TORCH := torch==2.13.0+cpu
CPU_INDEX := https://download.pytorch.org/whl/cpu

LIGHT := .venv-light
# The unit tests of the light half. Left out: training/ is torch throughout. A test elsewhere that needs Ray skips itself.
LIGHT_TESTS := tests/unit --ignore=tests/unit/training
# The checkers of .github, outside the checkout; another version gets another directory.
ZIZMOR := 1.32.0
CHECK_JSONSCHEMA := 0.39.0
CHECKERS := $(or $(INSITU_CACHE),$(HOME)/.cache/insitu)/tools/zizmor-$(ZIZMOR)-check-jsonschema-$(CHECK_JSONSCHEMA)

# What checks the recipes of deploy/, likewise.
DOCKERFILE_PARSE := 2.0.1
KUBERNETES_VALIDATE := 1.37.0
RECIPES := $(or $(INSITU_CACHE),$(HOME)/.cache/insitu)/tools/check-jsonschema-$(CHECK_JSONSCHEMA)-dockerfile-parse-$(DOCKERFILE_PARSE)-kubernetes-validate-$(KUBERNETES_VALIDATE)
SKYPILOT_VERSION := 0.14.1
SKYPILOT := $(or $(INSITU_CACHE),$(HOME)/.cache/insitu)/tools/skypilot-$(SKYPILOT_VERSION)

# What checks the dependencies, likewise.
PIP_AUDIT := 2.10.1
CYCLONEDX := 11.12.0
AUDITORS := $(or $(INSITU_CACHE),$(HOME)/.cache/insitu)/tools/pip-audit-$(PIP_AUDIT)-cyclonedx-$(CYCLONEDX)

# What builds the site, likewise.
MATERIAL := 9.8.1
MKDOCSTRINGS := 2.0.10
SITE := $(or $(INSITU_CACHE),$(HOME)/.cache/insitu)/tools/mkdocs-material-$(MATERIAL)-mkdocstrings-$(MKDOCSTRINGS)

.PHONY: setup quick check smoke light test sweeps faults frameworks sinks compat families gates doctor gate-long e2e bench workflows
.PHONY: guards recipes recipes-sky demo postgres lock sbom audit clean export-check site web view-check view-real pictures pages chromium

setup: $(VENV)/.ready postgres  ## create .venv with everything, from nothing

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	# PyPI has no CPU build of torch. Where no other source of pip has one, PyTorch's own index is asked.
	index=; $(BIN)/pip install --quiet --dry-run --no-deps '$(CPU_TORCH)' 2>/dev/null || index='--extra-index-url $(CPU_INDEX)'; \
	$(BIN)/pip install --quiet $$index --constraint constraints.txt --editable '.[backend-cpu,data,dev,frameworks]'
	# vLLM pulls CUDA builds of these; text models need none of them and transformers fails to import them.
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

postgres:  ## Debian's PostgreSQL for the tests, which start servers of their own
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends postgresql; \
	else \
		echo "PostgreSQL is missing: apt-get install --no-install-recommends postgresql, or set INSITU_NO_POSTGRES=1"; \
	fi

chromium:  ## Debian's Chromium for the tests of pages
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends chromium fonts-dejavu-core; \
	else \
		echo "Chromium is missing: apt-get install chromium, or name one in CHROMIUM"; \
	fi

P ?= tests/unit
quick:  ## lint and the tests of one folder or file, in seconds: make quick P=tests/unit/gateway
	@test -f $(VENV)/.ready || $(MAKE) setup
	$(BIN)/ruff check src tests benchmarks examples tools
	$(BIN)/ruff format --check src tests benchmarks examples tools
	$(BIN)/python -m tests.support.halves $(P) -q

check: setup  ## lint, types, import rules, unit tests
	$(BIN)/ruff check src tests benchmarks examples tools
	$(BIN)/ruff format --check src tests benchmarks examples tools
	$(BIN)/lint-imports --no-cache
	# Types are checked beside the first tests.
	$(BIN)/pyright & types=$$!; $(BIN)/python -m tests.support.lanes tests/unit -q --durations=8; tests=$$?; wait $$types && exit $$tests

smoke: setup  ## one training step on a real engine
	$(BIN)/python -m insitu.testing.models tiny
	$(BIN)/python -m tests.support.lanes tests/smoke -v

test: setup  ## contract, integration, fault and framework tests: real vLLM, tiny model
	$(BIN)/python -m insitu.testing.models tiny
	# Two lanes: while an engine starts or a test waits, the other lane has a core.
	$(BIN)/python -m tests.support.lanes tests/contract tests/integration tests/faults tests/frameworks \
		-v --durations=5 -m 'not sweep'

demo: setup  ## `insitu demo` as a newcomer runs it, in a folder of its own that is removed afterwards
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(BIN)/insitu demo --dir "$$folder/demo"

export-check: setup  ## exported weights in a plain vLLM give the backend's greedy answers
	$(BIN)/python -m insitu.testing.models tiny
	$(BIN)/python -m pytest tests/integration/test_exported_weights.py -v -s

sweeps: setup  ## what `make test` and `make e2e` leave out or only sample: twenty kills, 512 rollouts, two-turn learning
	$(BIN)/python -m insitu.testing.models tiny
	$(BIN)/python -m tests.frameworks.environment
	INSITU_TESTS=long $(BIN)/python -m pytest tests/integration tests/faults tests/frameworks tests/gates -m sweep -v -s --durations=2
	INSITU_TESTS=long $(BIN)/python -m pytest tests/faults/test_finetune_killed.py \
		tests/integration/test_exactness_zoo.py -v -s --durations=2
	$(BIN)/python -m insitu.testing.models smollm2
	$(BIN)/python -m pytest tests/e2e -m sweep -v -s

faults: setup  ## a fault at every change of a backend's disk; resumes, and writes the table of docs/reliability.md
	$(BIN)/python -m tests.faults.rig --part kills-adapter kills-merged power-adapter power-merged times-adapter times-merged --table

guards: setup  ## take out every guard of tests/faults/guards.toml in a copy of the sources: its test must fail
	$(BIN)/python -m tests.faults.guards

light: $(LIGHT)/.ready postgres  ## unit tests of the light half, in an environment without torch, vLLM and Ray
	$(LIGHT)/bin/python -m pytest $(LIGHT_TESTS) -q

$(LIGHT)/.ready: Makefile pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(LIGHT)
	$(LIGHT)/bin/pip install --quiet --upgrade pip
	$(LIGHT)/bin/pip install --quiet --constraint constraints.txt --editable '.[anthropic,data,langchain,openai,postgres]' \
		httpx hypothesis pytest pytest-asyncio pytest-timeout tokenizers
	touch $@

frameworks: setup  ## agents of the frameworks that need an environment of their own, built when missing
	$(BIN)/python -m insitu.testing.models tiny
	$(BIN)/python -m tests.frameworks.environment
	$(BIN)/python -m pytest tests/frameworks/test_second.py -v -s

sinks: setup  ## the real libraries of the sinks read back what the run's files have, in an environment of their own
	PYTHONPATH=$(CURDIR) $$($(BIN)/python -m tests.sinks.environment) -m pytest tests/sinks -v --durations=0

compat: setup  ## clients of others, unmodified, in environments of their own (built when missing)
	$(BIN)/python -m insitu.testing.models tiny
	$(BIN)/python -m tests.compat.environment
	$(BIN)/python -m pytest tests/compat -v --durations=0

families: setup  ## every family of models through the trainer and vLLM's classes: writes docs/models.md (5 minutes)
	$(BIN)/python -m tests.gates.families.look
	$(BIN)/python tools/models_page.py

gates: setup  ## claims about GPUs, proved without one: a line for each
	$(BIN)/python -m tests.support.lanes tests/gates -q -s --durations=3 -m 'not sweep'

doctor: setup  ## the doctor on this machine, and on a trainer that was made to compute wrongly
	$(BIN)/python -m pytest tests/integration/test_doctor.py -v

gate-long: setup  ## the gate of long rollouts at full size (2 minutes)
	INSITU_GATES=long $(BIN)/python -m pytest tests/gates/test_long_batches.py -q -s --durations=3

e2e: setup  ## a real model learns
	$(BIN)/python -m insitu.testing.models smollm2
	$(BIN)/python -m tests.support.lanes tests/e2e -v -s --durations=5 -m 'not sweep'

bench: setup  ## figures of the gateway, of a step, of the trainer alone and of thousands of rollouts
	$(BIN)/python benchmarks/gateway.py --json
	$(BIN)/python benchmarks/gateways.py --json
	$(BIN)/python benchmarks/simulation.py --json
	$(BIN)/python benchmarks/step.py --json
	$(BIN)/python benchmarks/trainer.py --json
	$(BIN)/python benchmarks/rollouts.py --json
	$(BIN)/python benchmarks/interval.py --json

workflows: $(CHECKERS)/.ready  ## check .github: schemas, timeouts, permissions, injection
	$(CHECKERS)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(CHECKERS)/bin/check-jsonschema --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml
	$(CHECKERS)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	$(CHECKERS)/bin/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(CHECKERS)/bin/zizmor --offline --no-progress .github

$(CHECKERS)/.ready:
	$(PYTHON) -m venv --clear $(CHECKERS)
	$(CHECKERS)/bin/pip install --quiet zizmor==$(ZIZMOR) check-jsonschema==$(CHECK_JSONSCHEMA)
	touch $@

recipes: $(RECIPES)/.ready  ## check deploy/: the schemas of Compose and Kubernetes, the stages of the Dockerfile, `docker compose config` if there is one
	$(RECIPES)/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(RECIPES)/bin/python tools/check_dockerfile.py deploy/Dockerfile
	$(RECIPES)/bin/python tools/check_kubernetes.py deploy/kuberay.yaml
	if docker compose version >/dev/null 2>&1; then INSITU_API_KEY=any docker compose --file deploy/compose.yaml config --quiet; else echo "docker compose is not installed: config not checked"; fi

$(RECIPES)/.ready:
	$(PYTHON) -m venv --clear $(RECIPES)
	$(RECIPES)/bin/pip install --quiet check-jsonschema==$(CHECK_JSONSCHEMA) dockerfile-parse==$(DOCKERFILE_PARSE) kubernetes-validate==$(KUBERNETES_VALIDATE) PyYAML
	touch $@

recipes-sky: $(SKYPILOT)/.ready  ## let SkyPilot itself read deploy/sky.yaml; its installation takes minutes
	$(SKYPILOT)/bin/python -c "import sky; print(sky.Task.from_yaml('deploy/sky.yaml'))"

$(SKYPILOT)/.ready:
	$(PYTHON) -m venv --clear $(SKYPILOT)
	$(SKYPILOT)/bin/pip install --quiet skypilot==$(SKYPILOT_VERSION)
	touch $@

site: $(SITE)/.ready  ## the docs as a site, in dist/site; a dead link or a page outside the menu is an error
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build --quiet

$(SITE)/.ready:
	$(PYTHON) -m venv --clear $(SITE)
	$(SITE)/bin/pip install --quiet mkdocs-material==$(MATERIAL) mkdocstrings-python==$(MKDOCSTRINGS) ruff
	touch $@

web:  ## build the pages of `insitu view` into src/insitu/view/pages and test their functions; needs Node 20
	cd web && npm ci --no-audit --no-fund && npm run build && npm test

pages: web chromium view-check  ## the committed pages are those of the sources, and work in a browser (2 minutes)
	git diff --exit-code --stat -- src/insitu/view/pages

view-check: setup  ## every page of `insitu view` in Chromium: light, dark, narrow, wide, keyboard, hostile texts; needs Node 20
	cd web && npm ci --no-audit --no-fund
	cd web && export PYTHON="$(CURDIR)/$(BIN)/python"; tests="node --test --test-concurrency=1 browser/*.test.mjs"; \
	$$tests || { echo "UNSTEADY: once more, and this time it counts"; $$tests; }

view-real: setup chromium  ## every page over a real backend and two real runs of addition (10 minutes); needs Node 20
	cd web && npm ci --no-audit --no-fund
	cd web && PYTHON="$(CURDIR)/$(BIN)/python" node --test browser/real_backend.mjs

pictures: setup chromium  ## the pictures of docs/view.md, from a real backend and a real run (6 minutes); needs Node 20
	cd web && npm ci --no-audit --no-fund
	cd web && PYTHON="$(CURDIR)/$(BIN)/python" node pictures.mjs

lock: setup  ## write requirements/light.lock again, after a change of pyproject.toml or constraints.txt
	$(BIN)/python tools/lock.py

sbom: $(AUDITORS)/.ready  ## bill of materials of the light install: CycloneDX 1.6, checked against the schema
	$(AUDITORS)/bin/python tools/sbom.py dist/insitu-light.cdx.json

AUDIT ?=
audit: $(AUDITORS)/.ready  ## known vulnerabilities in the lock; what cannot be looked up is a warning, AUDIT=--strict fails
	$(AUDITORS)/bin/python tools/audit.py $(AUDIT)

$(AUDITORS)/.ready:
	$(PYTHON) -m venv --clear $(AUDITORS)
	$(AUDITORS)/bin/pip install --quiet pip-audit==$(PIP_AUDIT) 'cyclonedx-python-lib[json-validation]==$(CYCLONEDX)'
	touch $@

clean:
	rm -rf $(VENV) $(LIGHT) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
