-- -> {place in the lane or -1, fields of the record}; no fields: unknown
local id = ARGV[1]
local record = whole(id)
local place = nil
if #record > 0 and call('HGET', job_key(id), 'state') == 'queued' then
  place = lane_position(P .. call('HGET', job_key(id), 'lane'), id)
end
return {place or -1, record}
