"""Pure learning: recorded tokens and rewards in, a changed adapter out. No HTTP, no Ray, no database.

A step reads: ``group_advantages → build_sequences → plan → collate → forward_backward → optimizer_step``.

========================  =================================================================
``advantage.py``          rewards of a group → one advantage per rollout
``sequences.py``          recorded calls of a rollout → training sequences
``batching.py``           sequences → micro-batches under a token budget, shared over ranks
``logprobs.py``           logits → log-probability and entropy of the sampled tokens
``loss.py``               the clipped GRPO objective and the KL penalty
``policy.py``             the base model, loaded once, sharded with FSDP2 over several ranks
``lora.py``               adapters on that base: add, switch, remove, read, merge
``learner.py``            what one run owns: adapter, optimizer, RNG; to and from files
``step.py``               forward and backward of a micro-batch, the optimizer step
``export.py``             merged weights as a directory that an engine reloads
========================  =================================================================
"""
