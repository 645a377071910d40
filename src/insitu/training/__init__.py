"""Pure learning: recorded tokens and rewards in, a changed adapter out. No HTTP, no Ray, no database.

A step reads: ``build_batch → pack_step → Passes → optimizer_step``.

========================  =================================================================
``advantage.py``          rewards of a group → one advantage per model call
``selection.py``          groups and their calls → the batch of a step; what is dropped, by reason
``sampling.py``           recorded sampling settings: the temperature, and what training cannot undo
``strands.py``            the stored tokens of a rollout's calls, each copied and hashed once
``sequences.py``          recorded calls of a rollout → training sequences
``objective.py``          named losses and methods: surrogate, weights, clip; a sequence's share in one
``trie.py``               token sequences → rows that compute every common prefix once
``packing.py``            sequences → micro-batches under a token budget; one message per rank
``batching.py``           a micro-batch's columns → the tensors of one forward pass
``attention.py``          attention over such rows, for CPU and CUDA
``logprobs.py``           logits → log-probability and entropy of the sampled tokens
``loss.py``               the terms of the objective, each with its sums and metrics
``policy.py``             the base model, loaded once, sharded with FSDP2 over several ranks
``lora.py``               adapters on that base: add, switch, remove, read, merge
``learner.py``            one run's adapter, optimizer and RNG; to and from files
``step.py``               forward and backward of a micro-batch, the optimizer step
``passes.py``             passes over the micro-batches of a step, and its metrics
``export.py``             merged weights as a directory that an engine reloads
========================  =================================================================
"""
