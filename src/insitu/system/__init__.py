"""What a process needs from its machine: keys, logs, paths, threads, open files, SQLite."""
