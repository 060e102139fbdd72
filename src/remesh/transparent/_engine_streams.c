/* How an Engine carries long payloads over a network: in pieces, some of them under way at a time.
 *
 *     sender    ANNOUNCED ────────────>  matches a receive
 *               stream   <────────────  WANTED (tag of the stream, bytes of a piece)
 *               piece, piece, ... ─────>  written into the receiver's program
 *
 * A piece is copied between the program and a buffer of ours while others are on their way; where the program's buffer
 * is shared with us MPI works on it in place. transfers.py says what the words mean, and does what this leaves: payloads
 * of unknown size, or longer than their buffer. A stream that has begun ends also while closed.
 */
#include "_engine.h"
#include <stdlib.h>

enum { MOST_SPARE = 8, NUM_STREAM_TAGS = 30000, LARGEST_PIECE_BYTES = 1 << 28 };

int new_stream_tag(Engine *e) {
    /* MPI promises tags up to 32767; 0 is that of wire messages. */
    e->next_stream = (e->next_stream + 1) % NUM_STREAM_TAGS;
    return 1 + e->next_stream;
}

/* Fresh buffers cost page faults, so used ones are kept. */
static char *borrow(Engine *e) {
    return e->num_spare ? e->spare[--e->num_spare] : malloc((size_t)e->piece_bytes);
}

static void give_back(Engine *e, char *buffer) {
    if (buffer == NULL) return;
    if (e->spare == NULL) e->spare = calloc(MOST_SPARE, sizeof *e->spare);
    if (e->spare != NULL && e->num_spare < MOST_SPARE) e->spare[e->num_spare++] = buffer;
    else free(buffer);
}

static Stream *push_stream(Engine *e, Request *request, int64_t total, int64_t piece_bytes) {
    Stream *streams = with_room(e->streams, e->num_streams, &e->room_streams, sizeof *streams);
    if (streams == NULL) return NULL;
    e->streams = streams;
    Stream *one = &e->streams[e->num_streams++];
    memset(one, 0, sizeof *one);
    Py_INCREF((PyObject *)request);
    one->request = request;
    one->total = total;
    one->piece_bytes = piece_bytes;
    return one;
}

int stream_in(Engine *e, Request *request, const Arrived *message) {
    int64_t num_bytes = message->num_bytes;
    /* All arenas have the same addresses: between two of them the payload is one message of MPI's. */
    int is_shared = in_arena(e, message->address, num_bytes) != NULL && in_arena(e, request->address, num_bytes) != NULL;
    Stream *one = push_stream(e, request, num_bytes, is_shared ? LARGEST_PIECE_BYTES : e->piece_bytes);
    if (one == NULL) return -1;
    one->peer = message->source;
    one->tag = new_stream_tag(e);
    uint64_t fields[7] = {
        request->comm, 0, WANTED, message->sender_request, (uint64_t)one->tag, 0, (uint64_t)one->piece_bytes};
    return send_wire(e, one->peer, fields, NULL, 0);
}

int stream_out(Engine *e, int dest, Request *request, uint64_t tag, int64_t piece_bytes) {
    int is_whole = in_arena(e, request->address, request->num_bytes) != NULL;
    if (piece_bytes <= 0 || piece_bytes > LARGEST_PIECE_BYTES || (piece_bytes > e->piece_bytes && !is_whole))
        return PyErr_Format(PyExc_ValueError, "rank %d wants pieces of %lld bytes", dest, (long long)piece_bytes), -1;
    Stream *one = push_stream(e, request, request->num_bytes, piece_bytes);
    if (one == NULL) return -1;
    one->is_sending = 1;
    one->peer = dest;
    one->tag = (int)tag;
    return 0;
}

/* Hand the next piece to MPI. */
static int start_piece(Engine *e, Stream *one) {
    Piece *piece = &one->pieces[(one->first + one->count) % PIECES_IN_FLIGHT];
    int64_t left = one->total - one->started;
    memset(piece, 0, sizeof *piece);
    piece->num_bytes = left < one->piece_bytes ? left : one->piece_bytes;
    uint64_t address = one->request->address + (uint64_t)one->started;
    char *place = in_arena(e, address, piece->num_bytes);
    if (place == NULL) {
        if ((place = piece->buffer = borrow(e)) == NULL) return PyErr_NoMemory(), -1;
        if (one->is_sending && carry_memory(e, address, place, piece->num_bytes, 0)) return -1;
    }
    int (*start)(void *, int, Handle, int, int, Handle, uint64_t *) = e->function[one->is_sending ? FN_ISEND : FN_IRECV];
    int code = start(place, (int)piece->num_bytes, e->byte, one->peer, one->tag, e->comm, &piece->real);
    if (code) return mpi_failed(one->is_sending ? "sending a piece" : "receiving a piece", code);
    one->started += piece->num_bytes;
    one->count++;
    return 0;
}

/* The oldest piece is over. */
static int end_piece(Engine *e, Stream *one) {
    Piece *piece = &one->pieces[one->first];
    uint64_t address = one->request->address + (uint64_t)one->ended;
    if (!one->is_sending && piece->buffer != NULL && carry_memory(e, address, piece->buffer, piece->num_bytes, 1)) return -1;
    one->ended += piece->num_bytes;
    one->first = (one->first + 1) % PIECES_IN_FLIGHT;
    one->count--;
    give_back(e, piece->buffer);
    return 0;
}

int look_at_stream(Engine *e, Stream *one) {
    int (*test)(uint64_t *, int *, void *) = e->function[FN_TEST];
    if (one->count == 0) return 0;
    Piece *piece = &one->pieces[one->first];
    if (!piece->over) {
        int code = test(&piece->real, &piece->over, e->status);
        if (code) e->mpi_problem = code;
    }
    return piece->over;
}

int stream_on(Engine *e) {
    int progress = 0;
    size_t kept = 0, count = e->num_streams;
    for (size_t i = 0; i < count; i++) {
        Stream *one = &e->streams[i];
        while (look_at_stream(e, one) && !e->mpi_problem) {
            progress = 1;
            if (end_piece(e, one)) return -1;
            /* What has come makes room for the next before anything else: the other side waits for it. */
            if (one->started < one->total && start_piece(e, one)) return -1;
        }
        while (one->started < one->total && one->count < PIECES_IN_FLIGHT) {
            progress = 1;
            if (start_piece(e, one)) return -1;
        }
        if (one->ended < one->total) {
            e->streams[kept++] = *one;
            continue;
        }
        progress = 1;
        one->request->written = !one->is_sending;
        int failed = complete(e, one->request);
        Py_DECREF((PyObject *)one->request);
        if (failed) return -1;
    }
    e->num_streams = kept;
    return progress;
}

void drop_streams(Engine *e) {
    for (size_t i = 0; i < e->num_streams; i++) Py_DECREF((PyObject *)e->streams[i].request);
    while (e->num_spare) free(e->spare[--e->num_spare]);
    free(e->streams);
    free(e->spare);
    e->streams = NULL;
    e->spare = NULL;
    e->num_streams = e->room_streams = 0;
}
