/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Virtio ISM driver: what its files share.
 */
#ifndef _VISM_H
#define _VISM_H

#include <linux/completion.h>
#include <linux/dibs.h>
#include <linux/hashtable.h>
#include <linux/hrtimer.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/spinlock.h>
#include <linux/timer.h>
#include <linux/virtio.h>
#include <linux/virtio_ism.h>
#include <linux/workqueue.h>

#ifndef VIRTIO_ID_ISM
#define VIRTIO_ID_ISM		44
#endif

/* Of every device, since dibs_dev_ops.max_dmbs() has no argument. */
#define VISM_MAX_DMBS		4096
#define VISM_MAX_MOVE_QUEUES	4
#define VISM_MAX_SLOTS		128
#define VISM_EVENT_BUFFERS	64
#define VISM_FAILED_TOKENS	32
#define VISM_LEFT		16
/* The bit of a DMB's mask that belongs to an element of index 0. */
#define VISM_FIRST_MASK		0x1000

/**
 * struct vism_limits - what the configuration of a device allows
 * @features: feature bits of the device's type that are in use
 * @chid: fabric id
 * @move_queues: number of move queues that the driver uses
 * @max_dmbs: bound of the index of a DMB
 * @dmb_min: smallest DMB in bytes
 * @dmb_max: largest DMB in bytes
 * @max_move: most bytes of a move
 * @slab_align: of slabs in the window
 * @window_size: length of the window, 0 if the front end cannot map
 */
struct vism_limits {
	u32 features;
	u16 chid;
	unsigned int move_queues;
	u32 max_dmbs;
	u32 dmb_min;
	u32 dmb_max;
	u32 max_move;
	u32 slab_align;
	u64 window_size;
};

struct vism_slab;

/**
 * struct vism_dmb - a DMB that this device owns
 * @list: in &vism.dmbs, guarded by &vism.dmb_lock
 * @folio: its memory; NULL in the window
 * @slab: in which it lies; NULL in guest memory
 * @addr: its memory
 * @line: its signal line there
 * @bit: its bit of the line
 * @token: by which its user names it
 * @user: GID of its user
 * @len: its length in bytes, a power of two
 * @idx: index on this device
 * @peer_down: its user has gone
 * @round: in which clients were last told that again
 */
struct vism_dmb {
	struct list_head list;
	struct folio *folio;
	struct vism_slab *slab;
	void *addr;
	u16 line;
	u8 bit;
	u64 token;
	uuid_t user;
	u32 len;
	u32 idx;
	bool peer_down;
	u8 round;
};

/**
 * struct vism_slot - buffer of a move
 * @next: in the list of free slots
 * @message: header, segment and payload
 * @token: DMB that is written; 0 while the device does not have the slot
 * @status: of the device
 */
struct vism_slot {
	struct vism_slot *next;
	void *message;
	u64 token;
	__le32 status ____cacheline_aligned;
};

/**
 * struct vism_move_queue - a move queue
 * @ism: the device
 * @vq: the virtqueue
 * @lock: guards everything below
 * @slots: all slots
 * @free: slots that the device does not have
 * @nslots: number of slots
 * @outstanding: number of slots that the device has
 * @stuck: somebody has waited in vain since a slot came back last
 * @reaper: looks for late errors when nobody else does
 * @moves: moves that were posted
 * @bytes: payload of these
 * @errors: moves that the device has refused
 * @full: moves that had to wait for a slot
 * @dropped: moves that found no slot in time
 */
struct vism_move_queue {
	struct vism *ism;
	struct virtqueue *vq;
	spinlock_t lock; /* see above */
	struct vism_slot *slots;
	struct vism_slot *free;
	unsigned int nslots;
	unsigned int outstanding;
	bool stuck;
	struct timer_list reaper;
	u64 moves;
	u64 bytes;
	u64 errors;
	u64 full;
	u64 dropped;
};

/**
 * struct vism_control - the control queue
 * @vq: the virtqueue
 * @mutex: one command at a time
 * @lock: guards @vq and @reply_len
 * @done: the device has replied
 * @request: of the command
 * @reply: written by the device
 * @reply_len: bytes that the device has written, as it says
 * @tag: of the last command
 * @commands: commands that were sent
 * @refused: commands that the device has refused
 */
struct vism_control {
	struct virtqueue *vq;
	struct mutex mutex; /* see above */
	spinlock_t lock; /* see above */
	struct completion done;
	void *request;
	void *reply;
	u32 reply_len;
	u32 tag;
	u64 commands;
	u64 refused;
};

/**
 * struct vism_events - the event queue
 * @vq: the virtqueue
 * @lock: guards @vq
 * @buffers: written by the device
 * @again: handles what an interrupt has left
 * @records: records that were read, by kind; those of unknown kinds at 0
 */
struct vism_events {
	struct virtqueue *vq;
	spinlock_t lock; /* see above */
	void *buffers;
	struct work_struct again;
	u64 records[VIRTIO_ISM_EV_LOST + 1];
};

/**
 * struct vism_window - memory that is shared with peers
 * @base: physical address of the window
 * @len: its length, 0 if it is not used
 * @mutex: one change of @slabs at a time
 * @slabs: slabs that are mapped, also guarded by &vism.dmb_lock
 * @peers: DMBs of peers by token, guarded by &vism.dmb_lock and RCU
 * @npeers: number of them
 * @work: attaches and detaches DMBs of peers, and returns slabs
 * @look: looks at slabs in case that a wake-up was lost
 * @poll: looks at busy slabs
 * @held: own DMBs that a client gave back while somebody reads their pages
 * @stores: writes into slabs of peers
 * @bytes: payload of these
 * @kicks: how often a peer slept
 * @signals: own DMBs that were found signalled
 */
struct vism_window {
	phys_addr_t base;
	u64 len;
	struct mutex mutex; /* see above */
	struct list_head slabs;
	DECLARE_HASHTABLE(peers, 8);
	unsigned int npeers;
	struct work_struct work;
	struct delayed_work look;
	struct hrtimer poll;
	struct list_head held;
	atomic64_t stores;
	atomic64_t bytes;
	atomic64_t kicks;
	atomic64_t signals;
};

/**
 * struct vism - a virtio ISM device
 * @vdev: the virtio device
 * @dibs: what dibs knows of it; NULL while there is none
 * @limits: of its configuration
 * @gid: of its session
 * @failed: it is used no more until it was reset
 * @running: between bring-up and reset: the device may access memory
 * @failures: how often it has failed, for the delay of the next restart
 * @restart: resets the device and begins a new session
 * @replace: gives dibs a device for the new session
 * @control: control queue
 * @events: event queue
 * @moves: move queues
 * @window: slabs, and DMBs of peers in them
 * @dmb_lock: guards @dmbs, @orphans, @idx_map, @left and @next_left
 * @dmbs: own DMBs
 * @orphans: DMBs whose end the device has not confirmed
 * @idx_map: indices in use
 * @left: peers that have gone last
 * @next_left: where the next one goes
 * @tell: tells clients again that peers have gone
 * @tell_delay: when it does so next, in jiffies
 * @tell_round: number of times that it did
 * @failed_lock: guards @failed_tokens and @next_failed
 * @failed_tokens: DMBs of peers to which a move has failed
 * @next_failed: where the next one goes
 * @debugfs: directory
 */
struct vism {
	struct virtio_device *vdev;
	struct dibs_dev *dibs;
	struct vism_limits limits;
	uuid_t gid;
	bool failed;
	bool running;
	unsigned int failures;
	struct delayed_work restart;
	struct work_struct replace;
	struct vism_control control;
	struct vism_events events;
	struct vism_move_queue moves[VISM_MAX_MOVE_QUEUES];
	struct vism_window window;
	spinlock_t dmb_lock; /* see above */
	struct list_head dmbs;
	struct list_head orphans;
	unsigned long *idx_map;
	uuid_t left[VISM_LEFT];
	unsigned int next_left;
	struct delayed_work tell;
	unsigned long tell_delay;
	u8 tell_round;
	spinlock_t failed_lock; /* see above */
	u64 failed_tokens[VISM_FAILED_TOKENS];
	unsigned int next_failed;
	struct dentry *debugfs;
};

static inline bool vism_has_feature(const struct vism *ism, unsigned int bit)
{
	return ism->limits.features & BIT(bit);
}

/* main.c */
void vism_fail(struct vism *ism, const char *why);

static inline bool vism_usable(const struct vism *ism)
{
	/* Pairs with the release when a session begins. */
	return !smp_load_acquire(&ism->failed) && READ_ONCE(ism->running);
}

/* control.c */
int vism_control_init(struct vism *ism);
void vism_control_exit(struct vism *ism);
void vism_control_callback(struct virtqueue *vq);
int vism_command(struct vism *ism, u16 op, const void *body, size_t len,
		 void *reply, size_t reply_len);
int vism_hello(struct vism *ism);
int vism_query_gid(struct vism *ism, const uuid_t *gid);
int vism_register(struct vism *ism, struct vism_dmb *dmb);
int vism_unregister(struct vism *ism, u64 token);
int vism_signal_event(struct vism *ism, const uuid_t *gid, u32 trigger,
		      u32 code, u64 info);

/* event.c */
int vism_events_init(struct vism *ism);
void vism_events_exit(struct vism *ism);
void vism_events_fill(struct vism *ism);
void vism_events_callback(struct virtqueue *vq);

/* move.c */
void vism_reaper(struct timer_list *timer);
int vism_move_init(struct vism_move_queue *queue);
void vism_move_exit(struct vism_move_queue *queue);
int vism_move(struct vism *ism, u64 token, u16 mask, bool signal, u32 offset,
	      const void *data, u32 size);
bool vism_move_settled(struct vism *ism, u64 token);

/* window.c */
#if IS_ENABLED(CONFIG_ZONE_DEVICE)
void vism_window_init(struct vism *ism);
void vism_window_open(struct vism *ism);
void vism_window_close(struct vism *ism);
void vism_window_exit(struct vism *ism);
int vism_window_register(struct vism *ism, struct vism_dmb *dmb);
void vism_window_unregister(struct vism *ism, struct vism_dmb *dmb);
int vism_window_move(struct vism *ism, u64 token, u16 mask, bool signal,
		     u32 offset, const void *data, u32 size);
void vism_window_wake(struct vism *ism, u32 id);
void vism_window_dmb_gone(struct vism *ism, u64 token);
void vism_window_peer_down(struct vism *ism, const uuid_t *gid);
#else
static inline void vism_window_init(struct vism *ism) { }
static inline void vism_window_open(struct vism *ism) { }
static inline void vism_window_close(struct vism *ism) { }
static inline void vism_window_exit(struct vism *ism) { }

static inline int vism_window_register(struct vism *ism, struct vism_dmb *dmb)
{
	return -EOPNOTSUPP;
}

static inline void vism_window_unregister(struct vism *ism,
					  struct vism_dmb *dmb) { }

static inline int vism_window_move(struct vism *ism, u64 token, u16 mask,
				   bool signal, u32 offset, const void *data,
				   u32 size)
{
	return -EOPNOTSUPP;
}

static inline void vism_window_wake(struct vism *ism, u32 id) { }
static inline void vism_window_dmb_gone(struct vism *ism, u64 token) { }

static inline void vism_window_peer_down(struct vism *ism,
					 const uuid_t *gid) { }
#endif

/* dibs.c */
int vism_dibs_add(struct vism *ism);
void vism_dibs_del(struct vism *ism);
void vism_dibs_signal(struct vism *ism, u32 idx, u16 mask);
void vism_dibs_event(struct vism *ism, const struct dibs_event *event);
void vism_dibs_peer_down(struct vism *ism, struct dibs_event *event);
void vism_peer_left(struct vism *ism, const uuid_t *gid);
bool vism_has_left(struct vism *ism, const uuid_t *gid);
void vism_tell_again(struct work_struct *work);
void vism_call_irq(struct dibs_dev *dibs, u32 idx, u16 mask);
void vism_free_orphans(struct vism *ism);

/* debugfs.c */
void vism_debugfs_init(void);
void vism_debugfs_exit(void);
void vism_debugfs_add(struct vism *ism);
void vism_debugfs_del(struct vism *ism);

#endif /* _VISM_H */
