"""``python -m insitu.gateway``."""

from insitu.gateway.process import main

if __name__ == "__main__":
    main()
