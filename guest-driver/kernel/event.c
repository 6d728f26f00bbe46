// SPDX-License-Identifier: GPL-2.0
/*
 * Virtio ISM driver: records of the event queue.
 */
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "vism.h"

/* Records that one interrupt handles; a work handles more. */
#define VISM_EVENT_BUDGET	256

union vism_record {
	struct virtio_ism_event event;
	struct virtio_ism_notice notice;
	struct virtio_ism_dmb_signal signal;
	struct virtio_ism_slab_wake wake;
	u8 bytes[VIRTIO_ISM_EVENT_LEN];
};

static_assert(sizeof(union vism_record) == VIRTIO_ISM_EVENT_LEN);

static void vism_handle_signals(struct vism *ism,
				const struct virtio_ism_dmb_signal *signal)
{
	u32 n = le32_to_cpu(signal->event.n);

	if (n > ARRAY_SIZE(signal->entries))
		return;
	for (u32 i = 0; i < n; i++)
		vism_dibs_signal(ism, le32_to_cpu(signal->entries[i].idx),
				 le16_to_cpu(signal->entries[i].mask));
}

static void vism_handle_wakes(struct vism *ism,
			      const struct virtio_ism_slab_wake *wake)
{
	u32 n = le32_to_cpu(wake->event.n);

	if (n > ARRAY_SIZE(wake->slabs))
		return;
	for (u32 i = 0; i < n; i++)
		vism_window_wake(ism, le32_to_cpu(wake->slabs[i]));
}

static void vism_handle_notice(struct vism *ism,
			       const struct virtio_ism_notice *notice)
{
	struct dibs_event event = { .time = le64_to_cpu(notice->time_ns) };

	import_uuid(&event.gid, notice->gid);
	switch (le16_to_cpu(notice->event.kind)) {
	case VIRTIO_ISM_EV_DMB_GONE:
		event.type = DIBS_BUF_EVENT;
		event.subtype = DIBS_BUF_UNREGISTERED;
		event.buffer_tok = le64_to_cpu(notice->token);
		vism_window_dmb_gone(ism, event.buffer_tok);
		vism_dibs_event(ism, &event);
		break;
	case VIRTIO_ISM_EV_PEER_DOWN:
		event.type = DIBS_DEV_EVENT;
		event.subtype = notice->event.subtype ? DIBS_DEV_ERR_STATE :
							DIBS_DEV_DISABLED;
		/* First: what is made for the peer at this moment looks for it. */
		vism_peer_left(ism, &event.gid);
		vism_window_peer_down(ism, &event.gid);
		vism_dibs_peer_down(ism, &event);
		break;
	case VIRTIO_ISM_EV_SW_EVENT:
		event.type = DIBS_SW_EVENT;
		event.subtype = le32_to_cpu(notice->code);
		event.data = le64_to_cpu(notice->info);
		vism_dibs_event(ism, &event);
		break;
	}
}

static void vism_handle_record(struct vism *ism, const union vism_record *record)
{
	u16 kind = le16_to_cpu(record->event.kind);

	ism->events.records[kind <= VIRTIO_ISM_EV_LOST ? kind : 0]++;
	switch (kind) {
	case VIRTIO_ISM_EV_DMB_SIGNAL:
		vism_handle_signals(ism, &record->signal);
		break;
	case VIRTIO_ISM_EV_SLAB_WAKE:
		vism_handle_wakes(ism, &record->wake);
		break;
	case VIRTIO_ISM_EV_DMB_GONE:
	case VIRTIO_ISM_EV_PEER_DOWN:
	case VIRTIO_ISM_EV_SW_EVENT:
		vism_handle_notice(ism, &record->notice);
		break;
	case VIRTIO_ISM_EV_LOST:
		dev_warn_ratelimited(&ism->vdev->dev, "%u software events lost\n",
				     le32_to_cpu(record->event.n));
		break;
	}
}

static int vism_post_buffer(struct vism *ism, void *buffer)
{
	struct scatterlist in;

	sg_init_one(&in, buffer, VIRTIO_ISM_EVENT_LEN);
	return virtqueue_add_inbuf(ism->events.vq, &in, 1, buffer, GFP_ATOMIC);
}

/**
 * vism_events_callback() - handle records of the event queue
 * @vq: the event queue
 *
 * Context: interrupt, or process.
 */
void vism_events_callback(struct virtqueue *vq)
{
	struct vism *ism = vq->vdev->priv;
	struct vism_events *events = &ism->events;
	int budget = VISM_EVENT_BUDGET;
	union vism_record record;
	unsigned long flags;
	bool more = true;
	void *buffer;
	u32 len;

	spin_lock_irqsave(&events->lock, flags);
	if (!events->vq || !vism_usable(ism)) {
		spin_unlock_irqrestore(&events->lock, flags);
		return;
	}
	do {
		virtqueue_disable_cb(vq);
		while (budget) {
			buffer = virtqueue_get_buf(vq, &len);
			if (!buffer)
				break;
			budget--;
			/* The device could write it at any time, so a copy is judged. */
			memcpy(&record, buffer, sizeof(record));
			if (vism_post_buffer(ism, buffer))
				break;
			if (len == sizeof(record))
				vism_handle_record(ism, &record);
		}
		if (!budget)
			break;
		more = !virtqueue_enable_cb(vq) && !virtqueue_is_broken(vq);
	} while (more);
	virtqueue_kick(vq);
	spin_unlock_irqrestore(&events->lock, flags);
	if (more)
		schedule_work(&events->again);
	if (virtqueue_is_broken(vq))
		vism_fail(ism, "event queue broken");
}

static void vism_events_again(struct work_struct *work)
{
	struct vism *ism = container_of(work, struct vism, events.again);
	struct virtqueue *vq = READ_ONCE(ism->events.vq);

	if (vq)
		vism_events_callback(vq);
}

/**
 * vism_events_fill() - give the device all event buffers
 * @ism: device, which is ready
 */
void vism_events_fill(struct vism *ism)
{
	struct vism_events *events = &ism->events;

	guard(spinlock_irqsave)(&events->lock);
	for (int i = 0; i < VISM_EVENT_BUFFERS && events->vq->num_free; i++)
		if (vism_post_buffer(ism, events->buffers + i * VIRTIO_ISM_EVENT_LEN))
			break;
	virtqueue_kick(events->vq);
}

/**
 * vism_events_init() - allocate event buffers
 * @ism: device
 *
 * Return: 0 or -ENOMEM.
 */
int vism_events_init(struct vism *ism)
{
	INIT_WORK(&ism->events.again, vism_events_again);
	ism->events.buffers = kcalloc(VISM_EVENT_BUFFERS, VIRTIO_ISM_EVENT_LEN,
				      GFP_KERNEL);
	return ism->events.buffers ? 0 : -ENOMEM;
}

/**
 * vism_events_exit() - free event buffers
 * @ism: device, which has no virtqueues
 */
void vism_events_exit(struct vism *ism)
{
	kfree(ism->events.buffers);
	ism->events.buffers = NULL;
}
