"""HTTP beside a broker: metrics, health. Needs the extra `http`. Loaded only if used."""
