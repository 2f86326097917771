"""Environments and rewards in separate processes, which can be ended whatever they do.

actor ──sample, answers, episodes──▶ user process ──▶ build_env, step, rewards
  │  ◀──messages, PNG, numbers─────      ▲
  └── "fork", "end" ──▶ fork server ─────┘ forks and reaps
"""
