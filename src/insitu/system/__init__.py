"""Services of the machine to one process: keys, logs, paths, threads, open files, SQLite."""
