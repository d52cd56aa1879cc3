-- ARGV: id. Returns 1 moved to the head, 0 it does not wait.
return lane_expedite(KEYS[1], ARGV[1])
