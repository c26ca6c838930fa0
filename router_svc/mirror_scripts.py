"""The Lua that keeps the mirrored index fenced; each script is one atomic step. Packed: hashes are 16 bytes each.

KEYS of all but STAGE: state, blocks, workers.
"""

from __future__ import annotations

from typing import Final

# ARGV: incarnation, first seq, last seq, ttl s, operations (kind, count as 4 bytes, hashes; repeated).
# "applied"; "old": all of it is known; "gap": another life, or batches are missing.
APPLY: Final = """
local state = redis.call('HMGET', KEYS[1], 'incarnation', 'seq')
local first, last = tonumber(ARGV[2]), tonumber(ARGV[3])
local seq = tonumber(state[2])
if state[1] ~= ARGV[1] or seq < first - 1 then return 'gap' end
if seq >= last then return 'old' end
local operations, at = ARGV[5], 1
while at <= #operations do
  local kind = string.sub(operations, at, at)
  local count = struct.unpack('>I4', operations, at + 1)
  at = at + 5
  if kind == 'C' then redis.call('UNLINK', KEYS[2]) end
  local command = kind == 'S' and 'SADD' or 'SREM'
  local part = {}
  for i = 1, count do
    part[#part + 1] = string.sub(operations, at, at + 15)
    at = at + 16
    if #part == 1000 or i == count then
      redis.call(command, KEYS[2], unpack(part))
      part = {}
    end
  end
end
redis.call('HSET', KEYS[1], 'seq', last)
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return 'applied'
"""

# KEYS: the staging key. ARGV: hashes.
STAGE: Final = """
local part = {}
for at = 1, #ARGV[1], 16 do
  part[#part + 1] = string.sub(ARGV[1], at, at + 15)
  if #part == 1000 then
    redis.call('SADD', KEYS[1], unpack(part))
    part = {}
  end
end
if #part > 0 then redis.call('SADD', KEYS[1], unpack(part)) end
redis.call('EXPIRE', KEYS[1], 60)
return 'staged'
"""

# ARGV: incarnation, its start, seq, ttl s, staging key, worker id.
# "replaced"; "fenced": a later life, or a later state of this one, is there already.
REPLACE: Final = """
local state = redis.call('HMGET', KEYS[1], 'incarnation', 'started', 'seq')
local same = state[1] == ARGV[1]
if (same and tonumber(state[3]) > tonumber(ARGV[3]))
    or (state[1] and not same and tonumber(state[2]) > tonumber(ARGV[2])) then
  redis.call('UNLINK', ARGV[5])
  return 'fenced'
end
redis.call('UNLINK', KEYS[2])
if redis.call('EXISTS', ARGV[5]) == 1 then redis.call('RENAME', ARGV[5], KEYS[2]) end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[1], 'started', ARGV[2], 'seq', ARGV[3])
redis.call('HINCRBY', KEYS[1], 'epoch', 1)
redis.call('SADD', KEYS[3], ARGV[6])
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return 'replaced'
"""

# ARGV: incarnation. "forgotten"; "fenced": a later life is there.
FORGET: Final = """
local incarnation = redis.call('HGET', KEYS[1], 'incarnation')
if incarnation ~= ARGV[1] then return 'fenced' end
redis.call('UNLINK', KEYS[1], KEYS[2])
redis.call('SREM', KEYS[3], string.sub(KEYS[1], #'shoal:kv:state:' + 1))
return 'forgotten'
"""
