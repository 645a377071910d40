"""Run the agent, score its rollouts, group them."""
