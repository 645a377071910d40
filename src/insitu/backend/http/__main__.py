"""`python -m insitu.backend.http`."""

from insitu.backend.http.process import main

if __name__ == "__main__":
    raise SystemExit(main())
