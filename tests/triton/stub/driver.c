/* A CUDA driver without a GPU: Triton's launcher links against it, and it keeps what arrives with a launch. What tests/triton/stub/gpu.py
 * reads and writes is named stub_*. Everything else succeeds and does nothing. */
#include <stdint.h>
#include <string.h>

enum { MOST = 512 };
int stub_count;         /* parameters of the kernel that is launched next, */
int stub_sizes[MOST];   /* and their bytes */
uint64_t stub_values[MOST];
int stub_launches;
unsigned stub_grid[3];
unsigned stub_threads;

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned attribute_count;
} Launch;

static int record(const unsigned *grid, unsigned threads, void **parameters) {
  ++stub_launches;
  memcpy(stub_grid, grid, sizeof stub_grid);
  stub_threads = threads;
  memset(stub_values, 0, sizeof stub_values);
  for (int i = 0; i < stub_count && i < MOST; ++i) memcpy(&stub_values[i], parameters[i], stub_sizes[i]);
  return 0;
}

int cuLaunchKernelEx(const Launch *launch, void *function, void **parameters, void **extra) {
  return record(launch->grid, launch->block[0], parameters);
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra) {
  const unsigned grid[3] = {gx, gy, gz};
  return record(grid, bx, parameters);
}

int cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t pointer) { return *value = pointer, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = 232448, 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
int cuCtxGetDevice(int *device) { return *device = 0, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)1, 0; }
int cuModuleLoadData(void **module, const void *image) { return *module = (void *)2, 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { return *function = (void *)3, 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { return *value = attribute ? 0 : 1024, 0; }
int cuGetErrorString(int error, const char **text) { return *text = "stub", 0; }
int cuGetErrorName(int error, const char **text) { return *text = "stub", 0; }
int cuStreamIsCapturing(void *stream, int *status) { return *status = 0, 0; }
int cuGetProcAddress_v2(void) { return 1; }

#define DOES_NOTHING(name) \
  int name(void) { return 0; }
DOES_NOTHING(cuInit)
DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuCtxSetLimit)
DOES_NOTHING(cuCtxGetLimit)
DOES_NOTHING(cuCtxSynchronize)
DOES_NOTHING(cuEventCreate)
DOES_NOTHING(cuEventRecord)
DOES_NOTHING(cuFuncSetAttribute)
DOES_NOTHING(cuFuncSetCacheConfig)
DOES_NOTHING(cuLaunchHostFunc)
DOES_NOTHING(cuMemAlloc_v2)
DOES_NOTHING(cuMemAllocAsync)
DOES_NOTHING(cuMemcpyDtoH_v2)
DOES_NOTHING(cuMemcpyHtoD_v2)
DOES_NOTHING(cuMemFree_v2)
DOES_NOTHING(cuMemFreeAsync)
DOES_NOTHING(cuMemsetD32Async)
DOES_NOTHING(cuMemsetD8_v2)
DOES_NOTHING(cuMemsetD8Async)
DOES_NOTHING(cuModuleUnload)
DOES_NOTHING(cuOccupancyMaxActiveClusters)
DOES_NOTHING(cuStreamGetCaptureInfo_v2)
DOES_NOTHING(cuStreamSynchronize)
DOES_NOTHING(cuTensorMapEncodeIm2col)
DOES_NOTHING(cuTensorMapEncodeTiled)
