/* A libnvidia-ml.so.1 that reports what a text file says ($FAKE_NVML), read again when it changes. Lines "KEY VALUE":
   count 2 | NAME.GPU NUMBER, see the functions below | xid.0 79 (an event each time that xid_number.0 changes) |
   error.FUNCTION[.GPU] CODE | hang.FUNCTION[.GPU] 1 | lost.GPU 1 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
typedef unsigned long long u64;
typedef struct { int n, mig; } Gpu, *Dev;
typedef struct { int n; u64 seen; } Events;
static Gpu gpu[64], slice[64];
static struct { char key[64]; u64 value; } entries[512];
static int entry_count;
static struct stat known;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static u64 get(const char *key, u64 fallback) {
  const char *path = getenv("FAKE_NVML");
  struct stat now;
  pthread_mutex_lock(&lock);
  if (path && !stat(path, &now) && (now.st_ino != known.st_ino || now.st_mtim.tv_nsec != known.st_mtim.tv_nsec || now.st_size != known.st_size)) {
    FILE *file = fopen(path, "r");
    known = now; entry_count = 0;
    while (file && entry_count < 512 && fscanf(file, "%63s %lli", entries[entry_count].key, (long long *)&entries[entry_count].value) == 2) entry_count++;
    if (file) fclose(file);
  }
  for (int i = entry_count; i--;) if (!strcmp(entries[i].key, key)) { fallback = entries[i].value; break; }
  pthread_mutex_unlock(&lock);
  return fallback;
}
static u64 at(const char *key, int n, u64 fallback) { char name[64]; snprintf(name, 64, "%s.%d", key, n); return get(name, fallback); }
static u64 own_or_all(const char *kind, const char *function, int n, u64 fallback) {
  char name[64]; snprintf(name, 64, "%s.%s", kind, function);
  return n < 0 ? get(name, fallback) : at(name, n, get(name, fallback));
}
static int enter(const char *function, int n) {  /* hang, then the error that is asked for */
  while (own_or_all("hang", function, n, 0)) usleep(10000);
  return own_or_all("error", function, n, n >= 0 && at("lost", n, 0) ? 15 : 0);
}
#define ENTER(f, n) { int failure = enter(f, n); if (failure) return failure; }
#define NUMBER(f, type, key, fallback) int nvmlDeviceGet##f(Dev d, type *v) { ENTER(#f, d->n) *v = at(key, d->n, fallback); return 0; }
int nvmlInit_v2(void) { ENTER("Init", -1) return 0; }
int nvmlInitWithFlags(unsigned f) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int e) { return e == 15 ? "GPU is lost" : e == 16 ? "GPU requires reset" : e == 3 ? "Not Supported" : e == 9 ? "Driver Not Loaded" : e == 18 ? "Driver/library version mismatch" : "Unknown Error"; }
int nvmlDeviceGetCount_v2(unsigned *c) { ENTER("Count", -1) *c = get("count", 1); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned n, Dev *d) { if (n >= get("count", 1)) return 2; ENTER("Handle", n) gpu[n].n = n; *d = &gpu[n]; return 0; }
int nvmlDeviceGetUUID(Dev d, char *s, unsigned n) { ENTER("UUID", d->n) snprintf(s, n, "GPU-%08d-fake-4000-8000-000000000000", d->n); return 0; }
int nvmlDeviceGetHandleByUUID(const char *s, Dev *d) {
  unsigned n;
  if (sscanf(s, "MIG-%8u", &n) == 1 && n < get("count", 1)) { slice[n].n = n; slice[n].mig = 1; *d = &slice[n]; return 0; }
  return sscanf(s, "GPU-%8u-fake", &n) == 1 ? nvmlDeviceGetHandleByIndex_v2(n, d) : 6;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Dev m, Dev *d) { return m->mig ? nvmlDeviceGetHandleByIndex_v2(m->n, d) : 2; }
int nvmlDeviceGetName(Dev d, char *s, unsigned n) { snprintf(s, n, "Fake H200"); return 0; }
int nvmlDeviceGetIndex(Dev d, unsigned *n) { *n = d->n; return 0; }
int nvmlDeviceGetMemoryInfo(Dev d, u64 *v) { ENTER("MemoryInfo", d->n) v[0] = 1000; v[2] = at("memory_used", d->n, 815); v[1] = v[0] - v[2]; return 0; }
int nvmlDeviceGetTemperature(Dev d, int sensor, unsigned *t) { ENTER("Temperature", d->n) *t = at("temp", d->n, 50); return 0; }
int nvmlDeviceGetMarginTemperature(Dev d, struct { unsigned version; int margin; } *v) { u64 m = at("margin", d->n, 1000); if (m == 1000) return 3; ENTER("Margin", d->n) v->margin = (int)m; return 0; }
int nvmlDeviceGetTemperatureThreshold(Dev d, int kind, unsigned *t) {
  static const char *k[] = {"shutdown", "slowdown", "mem_max", "gpu_max"}; static int v[] = {95, 92, 105, 87};
  if (kind > 3 || at("no_thresholds", d->n, 0)) return 3;
  *t = at(k[kind], d->n, v[kind]); return 0;
}
int nvmlDeviceGetTotalEccErrors(Dev d, int type, int counter, u64 *c) { ENTER("TotalEccErrors", d->n) char k[40]; snprintf(k, 40, "ecc_%s_%s", type ? "uncorrected" : "corrected", counter ? "aggregate" : "volatile"); *c = at(k, d->n, 0); return 0; }
int nvmlDeviceGetRemappedRows(Dev d, unsigned *c, unsigned *u, unsigned *p, unsigned *f) { ENTER("RemappedRows", d->n) *c = at("remap_corrected", d->n, 0); *u = at("remap_uncorrected", d->n, 0); *p = at("remap_pending", d->n, 0); *f = at("remap_failed", d->n, 0); return 0; }
NUMBER(CurrentClocksEventReasons, u64, "clocks", 0)
NUMBER(CurrPcieLinkWidth, unsigned, "pcie_width", 16)
NUMBER(CurrPcieLinkGeneration, unsigned, "pcie_gen", 5)
int nvmlDeviceGetClockInfo(Dev d, int type, unsigned *v) { ENTER("ClockInfo", d->n) *v = at("clock", d->n, 1900); return 0; }
int nvmlDeviceGetMaxClockInfo(Dev d, int type, unsigned *v) { ENTER("MaxClockInfo", d->n) *v = at("clock_max", d->n, 1980); return 0; }
int nvmlDeviceGetNvLinkState(Dev d, unsigned link, unsigned *up) { ENTER("NvLinkState", d->n) if (link >= at("nvlinks", d->n, 18)) return 2; char k[40]; snprintf(k, 40, "nvlink.%d.%u", d->n, link); *up = get(k, 1); return 0; }
typedef struct { unsigned field, scope; long long stamp, latency; int type, error; union { unsigned ui; u64 ull; } value; } Field;
int nvmlDeviceGetFieldValues(Dev d, int n, Field *f) {
  ENTER("FieldValues", d->n)
  for (; n--; f++) {
    char k[40]; snprintf(k, 40, "field_%u", f->field);
    u64 v = at(k, d->n, f->field == 230 ? at("recovery", d->n, 0) : f->field == 82 ? at("memory_temp", d->n, 60) : ~0ull);
    f->type = 1; f->error = v == ~0ull ? 3 : 0; f->value.ull = 0; f->value.ui = v;
  }
  return 0;
}
int nvmlEventSetCreate(void **set) { Events *e = calloc(1, sizeof *e); *set = e; return 0; }
int nvmlEventSetFree(void *set) { free(set); return 0; }
int nvmlDeviceRegisterEvents(Dev d, u64 types, void *set) { ENTER("RegisterEvents", d->n) Events *e = set; e->n = d->n; e->seen = at("xid_number", d->n, at("xid", d->n, 0)); return 0; }
int nvmlEventSetWait_v2(void *set, struct { Dev d; u64 type, data; unsigned gi, ci; } *event, unsigned ms) {
  Events *e = set;
  for (unsigned waited = 0;; waited += 50) {
    ENTER("EventSetWait", e->n)
    u64 x = at("xid", e->n, 0), number = at("xid_number", e->n, x);
    if (x && number != e->seen) { e->seen = number; event->d = &gpu[e->n]; event->type = 8; event->data = x; return 0; }
    if (waited >= ms) return 10;
    usleep(50000);
  }
}
