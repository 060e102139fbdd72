/* The upper half's part as a library, for programs that load it while they run. */
#include "in_place.h"
#include "plain.h"

extern char **environ;
static const Plain *lower;

__attribute__((visibility("default"))) const char *begin(const char *program) {
    const void *functions;
    const char *error = load_lower(program, "/none", environ, &functions);
    if (!error) lower = functions;
    return error;
}
__attribute__((visibility("default"))) int count(void) { return CROSS("", lower->count()); }
__attribute__((visibility("default"))) const char *end(void) { return drop_lower(); }
