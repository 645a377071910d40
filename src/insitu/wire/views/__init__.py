"""Answers of `insitu view` to its web pages: read-only, under `/view/v1`; docs/view.md shows the pages.

runs        the list of runs, one run's curves and where its rollouts went, its alarms
rollouts    a page of rollouts, one rollout with its conversation and tokens
groups      a page of groups, one group as a prefix tree, the same example over steps
compare     two files of rollouts on the same examples
"""
