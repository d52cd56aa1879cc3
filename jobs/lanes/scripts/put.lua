-- ARGV: tag, uuid, class, key, rows, eta, body. Returns 1 stored, 0 already there.
return lane_put(KEYS[1], unpack(ARGV))
