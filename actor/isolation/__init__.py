"""Environments and rewards in processes of their own, which can be ended whatever they do.

actor ──sample, answers, episodes──▶ user process ──▶ build_env, step, rewards
  │  ◀──messages, PNG, numbers─────      ▲
  └── "fork", "end" ──▶ nursery ─────────┘ forks and reaps
"""
