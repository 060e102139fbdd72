/* Made by `python -m remesh.carried.mpi.calls.calls_header` from the tables of calls/, which describe what everything
 * means. Structs are as they stand in a channel or a message: unaligned, little-endian.
 */
#ifndef REMESH_CALLS_H
#define REMESH_CALLS_H

#include <stdint.h>

#define LAID_OUT __attribute__((packed, may_alias))

#define DOORBELL 64
#define CORE 68
#define CALLS_WITHOUT 72
#define USED_SLOTS 76
#define SLEEPING 128
#define SPIN 192
#define GIVE_WAY 196
#define GATE 256
#define PROGRAM 320
#define OPENED 384
#define FIRST_SLOT 65536
#define STRIDE 65536
#define NUM_SLOTS 15
#define REPLY 64
#define WAITING 128
#define POSTED 192
#define TAKEN 256
#define BODY 320
#define RING 49152
#define RING_BYTES 16384
#define BODY_BYTES 48832
#define ARENA_START 35184372088832

#define EAGER_BYTES 32768
#define ANY (-1)
#define PARCEL (-1)
#define OK 0
#define FAILED 1
#define MAX_COUNTS 2048
#define MAX_RUNS 1024

enum { CALL_HELLO=1, CALL_DESCRIBE=2, CALL_FINISH=3, CALL_ABORT=4, CALL_SEND=5, CALL_RECEIVE=6, CALL_PROBE=7,
    CALL_RECEIVE_MESSAGE=8, CALL_WAIT=9, CALL_CANCEL=10, CALL_FREE=11, CALL_FETCH=12, CALL_MAKE_COMMUNICATOR=13,
    CALL_FREE_COMMUNICATOR=14, CALL_COLLECTIVE=15, CALL_START_RECEIVE=16, CALL_MAKE_WINDOW=17, CALL_FREE_WINDOW=18,
    CALL_ATTACH_MEMORY=19, CALL_DETACH_MEMORY=20, CALL_ACCESS=21, CALL_LOCK=22, CALL_UNLOCK=23, CALL_START_ACCESS=24 };

enum { FLAG_BLOCKING=1, FLAG_INLINE=2, FLAG_SYNCHRONOUS=4, FLAG_MATCHED=8 };

enum { MODE_ANY=0, MODE_ALL=1, MODE_SOME=2 };

enum { KIND_BARRIER=0, KIND_BCAST=1, KIND_GATHER=2, KIND_GATHERV=3, KIND_SCATTER=4, KIND_SCATTERV=5, KIND_ALLGATHER=6,
    KIND_ALLGATHERV=7, KIND_ALLTOALL=8, KIND_ALLTOALLV=9, KIND_REDUCE=10, KIND_ALLREDUCE=11, KIND_REDUCE_SCATTER=12,
    KIND_SCAN=13, KIND_EXSCAN=14 };

enum { PAYLOAD_NONE=0, PAYLOAD_INLINE=1, PAYLOAD_WRITTEN=2, PAYLOAD_PARCEL=3, PAYLOAD_CANCELLED=4 };

enum { OP_SUM=0, OP_PROD=1, OP_MAX=2, OP_MIN=3, OP_LAND=4, OP_LOR=5, OP_LXOR=6, OP_BAND=7, OP_BOR=8, OP_BXOR=9,
    OP_MINLOC=10, OP_MAXLOC=11, OP_REPLACE=12, OP_NO_OP=13, OP_COMPARE_AND_SWAP=14 };

enum { WHAT_MESSAGE=0, WHAT_ANNOUNCED=1, WHAT_WANTED=2, WHAT_TAKEN=3, WHAT_JOIN=4, WHAT_GO=5, WHAT_ANNOUNCED_WAITING=6,
    WHAT_HELPED=7, WHAT_ACCESS=8, WHAT_ACCESSED=9, WHAT_LOCK=10, WHAT_LOCKED=11, WHAT_UNLOCK=12, WHAT_PART=13,
    WHAT_ANNOUNCED_AHEAD=14, WHAT_ANNOUNCED_AHEAD_WHOLE=15, WHAT_DECLINED=16, WHAT_GIVEN_UP=17 };

typedef struct LAID_OUT { uint8_t call; } HelloCall;

typedef struct LAID_OUT { uint8_t call; } DescribeCall;

typedef struct LAID_OUT { uint8_t call; } FinishCall;

typedef struct LAID_OUT { uint8_t call; int32_t code; } AbortCall;

typedef struct LAID_OUT { uint8_t call; uint8_t flags; uint64_t comm; int32_t dest; int32_t tag; int64_t num_bytes;
    uint64_t address; } SendCall;

typedef struct LAID_OUT { uint8_t call; uint8_t flags; uint64_t comm; int32_t source; int32_t tag; int64_t capacity;
    uint64_t address; } ReceiveCall;

typedef struct LAID_OUT { uint8_t call; uint8_t flags; uint64_t comm; int32_t source; int32_t tag; } ProbeCall;

typedef struct LAID_OUT { uint8_t call; uint8_t flags; uint64_t message; int64_t capacity; uint64_t address; }
    ReceiveMessageCall;

typedef struct LAID_OUT { uint8_t call; uint8_t flags; uint8_t mode; uint32_t count; } WaitCall;

typedef struct LAID_OUT { uint8_t call; uint64_t request; } CancelCall;

typedef struct LAID_OUT { uint8_t call; uint64_t request; } FreeCall;

typedef struct LAID_OUT { uint8_t call; uint64_t parcel; uint64_t address; } FetchCall;

typedef struct LAID_OUT { uint8_t call; uint64_t comm; uint32_t count; uint64_t world_ranks; } MakeCommunicatorCall;

typedef struct LAID_OUT { uint8_t call; uint64_t comm; } FreeCommunicatorCall;

typedef struct LAID_OUT { uint8_t call; uint8_t flags; uint8_t kind; uint8_t op; uint8_t type; uint64_t comm; int32_t
    root; uint64_t send_address; int64_t send_bytes; uint64_t receive_address; int64_t receive_bytes; uint32_t
    num_counts; } CollectiveCall;

typedef struct LAID_OUT { uint8_t call; uint64_t request; uint64_t comm; int32_t source; int32_t tag; int64_t capacity;
    uint64_t address; } StartReceiveCall;

typedef struct LAID_OUT { uint8_t call; uint64_t window; uint64_t base; } MakeWindowCall;

typedef struct LAID_OUT { uint8_t call; uint64_t window; } FreeWindowCall;

typedef struct LAID_OUT { uint8_t call; uint64_t window; uint64_t address; int64_t num_bytes; } AttachMemoryCall;

typedef struct LAID_OUT { uint8_t call; uint64_t window; uint64_t address; } DetachMemoryCall;

typedef struct LAID_OUT { uint8_t call; uint8_t flags; uint8_t op; uint8_t type; uint8_t fetches; uint8_t unit; uint64_t
    window; int32_t target; uint64_t data; int64_t data_bytes; uint64_t result; uint32_t num_runs; } AccessCall;

typedef struct LAID_OUT { uint8_t call; uint8_t flags; uint64_t window; int32_t target; uint8_t exclusive; } LockCall;

typedef struct LAID_OUT { uint8_t call; uint64_t window; int32_t target; } UnlockCall;

typedef struct LAID_OUT { uint8_t call; uint64_t request; uint8_t op; uint8_t type; uint8_t fetches; uint64_t window;
    int32_t target; uint64_t result; uint32_t num_data; int64_t offset; int64_t num_bytes; } StartAccessCall;

typedef struct LAID_OUT { uint8_t status; int32_t rank; int32_t size; } HelloReply;

typedef struct LAID_OUT { uint8_t status; uint64_t request; } RequestReply;

typedef struct LAID_OUT { uint8_t status; uint8_t found; int32_t source; int32_t tag; int64_t num_bytes; uint64_t
    message; } ProbeReply;

typedef struct LAID_OUT { uint8_t status; uint32_t count; } WaitReply;

typedef struct LAID_OUT { uint8_t status; int32_t error; int32_t num_bytes; } Failure;

typedef struct LAID_OUT { uint32_t position; } Index;

typedef struct LAID_OUT { int32_t source; int32_t tag; int64_t num_bytes; int32_t error; uint8_t where; uint64_t parcel;
    } Completion;

typedef struct LAID_OUT { int64_t offset; int64_t num_bytes; } Run;

typedef struct LAID_OUT { uint64_t comm; int32_t tag; int16_t what; uint16_t core; int32_t source; int32_t pid; uint64_t
    request; uint64_t num_bytes; uint64_t address; } WireHeader;

#endif
