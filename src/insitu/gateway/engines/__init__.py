"""Who answers: the routing table, the replicas, and what they sampled."""
