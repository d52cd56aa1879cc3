-- ARGV: id. Returns how many come before it, or false (nil).
return lane_position(KEYS[1], ARGV[1])
