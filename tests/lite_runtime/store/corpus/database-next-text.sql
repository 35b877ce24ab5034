UPDATE store SET next = 'x', count = 'y', layout = zeroblob(100);
