"""The API process: runs, groups, steps, jobs and checkpoints over HTTP. It holds no accelerator."""
