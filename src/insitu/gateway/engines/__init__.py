"""The engines that answer: routing table, replicas, and the samples they return."""
