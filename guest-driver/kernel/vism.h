/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Virtio ISM driver: what its files share.
 */
#ifndef _VISM_H
#define _VISM_H

#include <linux/completion.h>
#include <linux/dibs.h>
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

/**
 * struct vism_limits - what the configuration of a device allows
 * @features: feature bits of the device's type that are in use
 * @chid: fabric id
 * @move_queues: number of move queues that the driver uses
 * @max_dmbs: bound of the index of a DMB
 * @dmb_min: smallest DMB in bytes
 * @dmb_max: largest DMB in bytes
 * @max_move: most bytes of a move
 */
struct vism_limits {
	u32 features;
	u16 chid;
	unsigned int move_queues;
	u32 max_dmbs;
	u32 dmb_min;
	u32 dmb_max;
	u32 max_move;
};

/**
 * struct vism_dmb - a DMB that this device owns
 * @list: in &vism.dmbs, guarded by &vism.dmb_lock
 * @folio: its memory
 * @token: by which its user names it
 * @user: GID of its user
 * @len: its length in bytes, a power of two
 * @idx: index on this device
 */
struct vism_dmb {
	struct list_head list;
	struct folio *folio;
	u64 token;
	uuid_t user;
	u32 len;
	u32 idx;
};

/**
 * struct vism_slot - buffer of a move
 * @next: in the list of free slots
 * @message: header, segment and payload
 * @token: DMB that is written
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
 * @dmb_lock: guards @dmbs, @orphans and @idx_map
 * @dmbs: own DMBs
 * @orphans: DMBs whose end the device has not confirmed
 * @idx_map: indices in use
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
	spinlock_t dmb_lock; /* see above */
	struct list_head dmbs;
	struct list_head orphans;
	unsigned long *idx_map;
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

/* dibs.c */
int vism_dibs_add(struct vism *ism);
void vism_dibs_del(struct vism *ism);
void vism_dibs_signal(struct vism *ism, u32 idx, u16 mask);
void vism_dibs_event(struct vism *ism, const struct dibs_event *event);
void vism_dibs_peer_down(struct vism *ism, struct dibs_event *event);
void vism_free_orphans(struct vism *ism);

/* debugfs.c */
void vism_debugfs_init(void);
void vism_debugfs_exit(void);
void vism_debugfs_add(struct vism *ism);
void vism_debugfs_del(struct vism *ism);

#endif /* _VISM_H */
