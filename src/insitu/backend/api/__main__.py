"""`python -m insitu.backend.api`."""

from insitu.backend.api.process import main

if __name__ == "__main__":
    raise SystemExit(main())
