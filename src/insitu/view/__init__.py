"""`insitu view`: pages about runs, read from their directories. Nothing of a run is ever changed.

run directory ──► reading/   an SQLite index beside it, filled as the files grow
                      │
                  answers/   messages of `insitu.wire.views`: curves, rollouts, trees, comparisons
                      │
                  http/      the routes under /view/v1, server-sent events, the built pages of pages/
"""
