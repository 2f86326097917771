"""Agents of the user's own (`rollout.agent`): programs that call the policy as a model behind OpenAI's API, or
Anthropic's."""
