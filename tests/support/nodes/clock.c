/* Another wall clock for one process: CLOCK_SKEW seconds, may be negative. Monotonic clocks, sleeps and file times stay true. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long skew(void) {
    const char *seconds = getenv("CLOCK_SKEW");
    return seconds ? atol(seconds) : 0;
}

int clock_gettime(clockid_t id, struct timespec *found) {
    int result = syscall(SYS_clock_gettime, id, found);
    if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) found->tv_sec += skew();
    return result;
}

int gettimeofday(struct timeval *found, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
